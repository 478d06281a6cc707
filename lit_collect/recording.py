"""Pictures of whole evaluation episodes, played on an env copy of their own."""

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from lit_collect.envs.factories import EnvSource, GymEnvFactory
from lit_collect.evaluation import Evaluator
from lit_collect.worker import build_runner

MODE = "rgb_array"
_DEFAULT_FPS = 30.0
_CHUNK = 256  # steps between two allocations; an episode that ends before stops the rest

Frame = np.ndarray
"""One picture, [height, width, 3] uint8."""


class CannotRecordError(ValueError):
    """The env gives no pictures; the message says what to do."""


class Camera(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Hands on what an env shows, from the next reset to the end of that episode.

    Args:
        env: with the render mode ``rgb_array``.
        max_frames: pictures of one episode at most.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], max_frames: int) -> None:
        super().__init__(env)
        self._max_frames = max_frames
        self._show: Callable[[Frame], None] | None = None
        self._left = 0  # pictures of this episode that may still come; 0 while none is recorded

    @property
    def fps(self) -> float:
        """Pictures per second at which the env looks right."""
        return float(self.env.metadata.get("render_fps") or _DEFAULT_FPS)

    def roll(self, show: Callable[[Frame], None]) -> None:
        """Record the episode that the next reset begins.

        Args:
            show: is given each picture.
        """
        self._show, self._left = show, 0

    def off(self) -> bool:
        """Whether the episode has been recorded."""
        return self._show is None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if self._left:  # the one before was cut from outside
            self._stop()
        seen = self.env.reset(**options)
        if self._show is not None:
            self._left = self._max_frames
            self._take()
        return seen

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Go on."""
        result = self.env.step(action)
        if self._show is not None:
            self._take()
            if result[2] or result[3]:
                self._stop()
        return result

    def _take(self) -> None:
        assert self._show is not None
        picture: Any = self.env.render()
        frame = np.asarray(picture)
        if frame.ndim != 3 or frame.shape[-1] != 3 or frame.dtype != np.uint8:
            raise CannotRecordError(
                f"render() does not give pictures : expected uint8 [height, width, 3], got {frame.dtype} {frame.shape}"
            )
        self._show(frame)
        self._left -= 1
        if not self._left:
            self._stop()

    def _stop(self) -> None:
        self._show, self._left = None, 0


class Recorder:
    """Plays the first episodes of an evaluation once more, with the policy that is evaluated, and shows them.

    The env, the random numbers and the policy's state are its own, so that neither training nor evaluation notice; the
    episodes are those that the evaluation's first env copy plays, as far as env and policy are deterministic. The env
    lives from the first episode to `close`.

    Args:
        evaluator: what is recorded.
        max_frames: pictures of one episode at most.

    Raises:
        CannotRecordError: if the env gives no pictures.
        WorkerFailedError: if the env's constructor raised.
    """

    def __init__(self, evaluator: Evaluator, *, max_frames: int) -> None:
        self._place = evaluator.place
        source = EnvSource(makers=(lambda: self._camera,), num_envs=None, live=False, description="the recorded env")
        spec = evaluator.first_copy(source)
        self._camera = open_camera(evaluator.source, max_frames)
        self._runner = build_runner(spec)  # closes the env if it fails

    @property
    def fps(self) -> float:
        """Pictures per second at which the env looks right."""
        return self._camera.fps

    def record(self, episode: int, show: Callable[[Frame], None]) -> None:
        """Play one episode to its end, or as far as it may be recorded.

        Args:
            episode: which one.
            show: is given each picture as it is taken.
        """
        self._runner.reseed(*self._place.streams(self._runner.indices, episode))
        self._camera.roll(show)
        while not self._camera.off():
            self._runner.collect(_CHUNK, version=0, interrupted=self._camera.off)

    def close(self) -> None:
        """Close the env; may be called again."""
        self._runner.close()


def open_camera(source: EnvSource, max_frames: int) -> Camera:
    """Make one env of a source so that it gives pictures.

    Raises:
        CannotRecordError: if it cannot.
    """
    maker = source.makers[0]
    if isinstance(maker, GymEnvFactory):
        _check_modes(maker)
        maker = copy.copy(maker)
        maker.make_kwargs = {**maker.make_kwargs, "render_mode": MODE}
    env = EnvSource(makers=(maker,), num_envs=None, live=False, description=source.description).make(0)
    if not isinstance(env, gymnasium.Env) or env.render_mode != MODE:
        kind = f"render_mode={env.render_mode!r}" if isinstance(env, gymnasium.Env) else "a vector env"
        env.close()
        raise CannotRecordError(
            f"{source.description} cannot be recorded : expected a gymnasium.Env with render_mode={MODE!r}, got "
            f"{kind}; let the callable make its env with render_mode={MODE!r}, or pass an id"
        )
    return Camera(env, max_frames)


def _check_modes(factory: GymEnvFactory) -> None:
    """Gymnasium would warn, and then let the constructor fail."""
    spec = gymnasium.registry.get(factory.env_id.rpartition(":")[2])
    if spec is None or spec.entry_point is None:  # an id without its version, or one that only makes vector envs
        return
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    modes = getattr(creator, "metadata", {}).get("render_modes")
    if modes is not None and MODE not in modes:
        raise CannotRecordError(
            f"{factory.env_id} cannot be recorded : expected the render mode {MODE!r}, got {list(modes)}"
        )
