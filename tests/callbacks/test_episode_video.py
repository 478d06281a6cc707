import importlib.util
import subprocess
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from torch import nn

from lit_collect import CollectorDataModule, EvaluationConfig, GymEnvFactory, RolloutConfig
from lit_collect.callbacks import CollectionMonitor, EpisodeVideo
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv

ENV_ID = "TestScreen-v0"
if importlib.util.find_spec("cv2"):
    importlib.import_module("cv2")  # now: it changes an environment variable


class Screen(gymnasium.Env):
    """Shows a grey that was drawn at the reset and grows with every step by the action; 5 steps an episode."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    made: ClassVar[list["Screen"]] = []

    def __init__(self, render_mode: str | None = None, broken_after: int | None = None, size=(16, 24)) -> None:
        self.observation_space = spaces.Box(0, 255, (1,), np.float32)
        self.action_space = spaces.Box(0, 10, (1,), np.float32)
        self.render_mode = render_mode
        self.closed = False
        self._size, self._broken_after = size, broken_after
        Screen.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.grey, self.elapsed = float(self.np_random.integers(10, 100)), 0
        return np.array([self.grey], np.float32), {}

    def step(self, action):
        self.grey += float(action[0])
        self.elapsed += 1
        return np.array([self.grey], np.float32), 1.0, self.elapsed == 5, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        if self.elapsed == self._broken_after:
            raise RuntimeError("the screen is broken")
        return np.full((*self._size, 3), round(self.grey), np.uint8)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _registered():
    Screen.made = []
    gymnasium.register(ENV_ID, Screen)
    yield
    del gymnasium.registry[ENV_ID]


class Evaluated(BoringRLModule):
    """Evaluates what its data module plays; keeps the rounds."""

    def __init__(self, policy: nn.Module | None = None) -> None:
        super().__init__(policy or ConstantPolicy([3.0]), learning_rate=0.5)
        self.rounds = []

    def validation_step(self, batch, batch_idx) -> None:
        self.rounds.append(batch.clone())

    def test_step(self, batch, batch_idx) -> None:
        self.rounds.append(batch.clone())


def screens(env=ENV_ID, **options) -> CollectorDataModule:
    settings = {
        "num_envs": 2,
        "frames_per_batch": 8,
        "total_frames": 16,
        "batches_per_epoch": 1,
        "evaluation": EvaluationConfig(num_episodes=2, num_envs=1),
        "seed": 0,
    }
    return CollectorDataModule(env, **{**settings, **options})


def greys(path) -> list[int]:
    """What the pictures of a file show. A gif leaves out a picture that repeats the one before it."""
    with Image.open(path) as video:
        found = []
        for number in range(video.n_frames):
            video.seek(number)
            found.append(video.convert("RGB").getpixel((0, 0))[0])
    return found


def test_pictures_are_those_of_the_episodes_that_are_evaluated(trainer_with, tmp_path) -> None:
    video, model = EpisodeVideo(num_episodes=2, format="gif"), Evaluated()
    trainer = trainer_with(video, max_epochs=-1)
    trainer.fit(model, datamodule=screens())
    names = ["step=8-episode=0.gif", "step=8-episode=1.gif", "step=16-episode=0.gif", "step=16-episode=1.gif"]
    folder = tmp_path / trainer.logger.log_dir / "videos"
    assert video.paths == [folder / name for name in names]
    assert len(model.rounds) == 4
    for path, played in zip(video.paths, model.rounds, strict=True):
        shown = [played["observation"][0, 0, 0], *played["next", "observation"][0, :, 0]]
        assert greys(path) == [round(grey.item()) for grey in shown]
    assert len(set(greys(video.paths[0]))) == 6
    # a step of 0.5 down after the first batch
    assert np.diff(greys(video.paths[0])).tolist() != np.diff(greys(video.paths[2])).tolist()


def test_training_and_evaluation_are_the_same_to_the_bit(trainer_with) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.tensor([5.0]))
            self.normalise = nn.BatchNorm1d(1, affine=False)

        def forward(self, observation):
            return torch.distributions.Normal(self.mean + 0 * self.normalise(observation), 2.0)

    def run(*callbacks):
        torch.manual_seed(3)
        model = Evaluated(Noisy())
        trainer = trainer_with(*callbacks, max_epochs=-1)
        trainer.fit(model, datamodule=screens(total_frames=64))
        return model, torch.rand(3)

    (bare, drawn), (filmed, drawn_filmed) = run(), run(EpisodeVideo(format="gif", num_episodes=3))
    assert len(bare.batches) == 8
    for one, other in [*zip(bare.batches, filmed.batches, strict=True), *zip(bare.rounds, filmed.rounds, strict=True)]:
        assert (one == other).all()
    assert all(torch.equal(one, filmed.state_dict()[name]) for name, one in bare.state_dict().items())
    assert torch.equal(drawn, drawn_filmed)


def test_averaged_weights_are_filmed_and_evaluated(trainer_with) -> None:
    video, model = EpisodeVideo(format="gif"), Evaluated(ConstantPolicy([8.0]))
    averaging = EMAWeightAveraging(decay=0.0, update_starting_at_step=100)  # the average stays where it began
    trainer_with(averaging, video, max_epochs=1).fit(model, datamodule=screens(batches_per_epoch=2))
    assert set(np.diff(greys(video.paths[0])).tolist()) == {8}
    assert {action.item() for action in model.rounds[0]["action"][0]} == {8.0}
    trained = {action.item() for batch in model.batches for action in batch["action"].flatten()}
    assert trained == {8.0, 7.5}


@pytest.mark.parametrize(("every", "steps"), [(1, [8, 16, 24, 32, 40]), (2, [8, 24, 40]), (4, [8, 40])])
def test_each_so_many_th_evaluation_is_recorded(trainer_with, every, steps) -> None:
    video = EpisodeVideo(every, format="gif")
    trainer = trainer_with(video, max_epochs=-1, num_sanity_val_steps=2)
    trainer.fit(Evaluated(), datamodule=screens(total_frames=40))
    assert [path.name for path in video.paths] == [f"step={step}-episode=0.gif" for step in steps]


def test_state_goes_on_counting_evaluations(trainer_with) -> None:
    video = EpisodeVideo(2, format="gif")
    trainer_with(video, max_epochs=1).fit(Evaluated(), datamodule=screens())
    other = EpisodeVideo(2, format="gif")
    other.load_state_dict(video.state_dict())
    trainer_with(other, max_epochs=1).fit(Evaluated(), datamodule=screens())
    assert (len(video.paths), len(other.paths)) == (1, 0)


def test_test_runs_are_recorded_beside_the_others(trainer_with, tmp_path) -> None:
    video, data = EpisodeVideo(format="gif", dirpath=tmp_path / "films"), screens()
    model = Evaluated()
    trainer_with(video, max_epochs=1).fit(model, datamodule=data)
    trainer_with(video).test(model, datamodule=data, verbose=False)
    names = ["step=8-episode=0.gif", "test-step=8-episode=0.gif"]
    assert sorted(path.name for path in (tmp_path / "films" / "videos").iterdir()) == names


@pytest.mark.parametrize(("limit", "pictures"), [(1, 1), (3, 3), (6, 6), (7, 6)])
def test_no_more_pictures_are_taken_than_allowed(trainer_with, limit, pictures) -> None:
    video = EpisodeVideo(format="gif", max_frames=limit)
    trainer_with(video).fit(Evaluated(), datamodule=screens())
    assert len(greys(video.paths[0])) == pictures


def test_episode_that_is_cut_from_outside_ends_the_video(trainer_with) -> None:
    video = EpisodeVideo(format="gif")
    trainer_with(video).fit(Evaluated(), datamodule=screens(rollout=RolloutConfig(max_frames_per_traj=2)))
    assert len(greys(video.paths[0])) == 3


@pytest.mark.parametrize(("fps", "each_ms"), [(None, 100), (25, 40), (1000, 20)])
def test_pictures_last_as_the_env_or_the_user_says(trainer_with, fps, each_ms) -> None:
    video = EpisodeVideo(format="gif", fps=fps)
    trainer_with(video).fit(Evaluated(), datamodule=screens())
    with Image.open(video.paths[0]) as film:
        assert film.info["duration"] == each_ms


@pytest.mark.parametrize("package", ["imageio_ffmpeg", "cv2"])
def test_mp4_is_written_by_whichever_package_there_is(trainer_with, package, monkeypatch) -> None:
    pytest.importorskip(package)
    find_spec = importlib.util.find_spec
    without = {"imageio_ffmpeg", "cv2"} - {package}
    monkeypatch.setattr(
        "lit_collect.callbacks._video_files.find_spec", lambda name: None if name in without else find_spec(name)
    )
    video = EpisodeVideo()
    trainer_with(video).fit(
        Evaluated(ConstantPolicy([10.0])), datamodule=screens(GymEnvFactory(ENV_ID, {"size": (17, 31)}))
    )
    (path,) = video.paths
    assert path.suffix == ".mp4"
    assert b"ftyp" in path.read_bytes()[:16]
    if package == "imageio_ffmpeg":
        program = importlib.import_module(package).get_ffmpeg_exe()
        command = [program, "-i", path, "-f", "rawvideo", "-pix_fmt", "gray", "-"]
        decoded = subprocess.run(command, check=True, capture_output=True).stdout
        pictures = np.frombuffer(decoded, np.uint8).reshape(-1, 18, 32)  # even
        assert len(pictures) == 6
        assert np.diff(pictures.astype(int).mean((1, 2))) == pytest.approx(10, abs=2)


def test_callable_that_makes_pictures_is_recorded(trainer_with) -> None:
    video = EpisodeVideo(format="gif")
    trainer_with(video).fit(Evaluated(), datamodule=screens(partial(Screen, "rgb_array")))
    assert len(greys(video.paths[0])) == 6


@pytest.mark.parametrize(
    ("env", "model", "message"),
    [
        (partial(Screen), Evaluated, "expected a gymnasium.Env with render_mode='rgb_array', got render_mode=None"),
        (CountingEnv, BoringRLModule, "got render_mode=None; let the callable make its env with render_mode="),
        ({"broken_after": 3}, Evaluated, "the screen is broken"),
    ],
)
def test_env_without_pictures_costs_one_warning_and_no_run(trainer_with, tmp_path, env, model, message) -> None:
    class Model(model):
        def validation_step(self, batch, batch_idx) -> None:
            pass

    data = screens(GymEnvFactory(ENV_ID, env) if isinstance(env, dict) else env)
    video = EpisodeVideo(format="gif", dirpath=tmp_path / "films")
    with pytest.warns(UserWarning, match=message) as warned:
        trainer_with(video, max_epochs=-1).fit(Model(), datamodule=data)
    assert sum("no more videos are recorded" in str(one.message) for one in warned) == 1
    assert data.frames_total == 16
    assert video.paths == []
    assert not list((tmp_path / "films").rglob("*.gif"))


def test_id_without_the_render_mode_costs_one_warning(trainer_with, monkeypatch) -> None:
    monkeypatch.setattr(Screen, "metadata", {"render_modes": ["ansi"]})
    video = EpisodeVideo(format="gif")
    with pytest.warns(UserWarning, match=r"TestScreen-v0 cannot be recorded : expected the render mode 'rgb_array'"):
        trainer_with(video, max_epochs=-1).fit(Evaluated(), datamodule=screens())


def test_recorded_envs_are_closed(trainer_with) -> None:
    trainer_with(EpisodeVideo(format="gif"), max_epochs=-1).fit(Evaluated(), datamodule=screens())
    filmed = [env for env in Screen.made if env.render_mode == "rgb_array"]
    assert len(filmed) == 2
    assert all(env.closed for env in Screen.made)


class SecondOfTwo(SingleDeviceStrategy):
    """Of two ranks the second one, as far as files are concerned."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size, self.global_rank = 2, 1

    @property
    def is_global_zero(self) -> bool:
        return False

    def reduce(self, tensor, *args, **kwargs):
        return 2 * tensor

    def all_gather(self, tensor, *args, **kwargs):
        return torch.stack((tensor, tensor))


def test_other_ranks_record_nothing_and_count(trainer_with) -> None:
    video = EpisodeVideo(format="gif")
    trainer_with(video, strategy=SecondOfTwo(), logger=False).fit(Evaluated(), datamodule=screens(total_frames=32))
    assert video.paths == []
    assert video.state_dict() == {"evaluations": 1}
    assert all(env.render_mode is None for env in Screen.made)


def test_loggers_that_take_videos_get_them(trainer_with, tmp_path) -> None:
    class Films(CSVLogger):
        def log_video(self, key, videos, step=None, **kwargs) -> None:
            logged.append((key, [str(path) for path in videos], step))

    logged = []
    video = EpisodeVideo(num_episodes=2, format="gif")
    trainer_with(video, logger=[CSVLogger(tmp_path), Films(tmp_path)]).fit(Evaluated(), datamodule=screens())
    assert logged == [("eval/video", [str(path) for path in video.paths], 1)]
    assert len(video.paths) == 2


@pytest.mark.parametrize("there", [True, False])
def test_tensorboard_gets_pictures_where_it_can_encode_them(trainer_with, tmp_path, monkeypatch, there) -> None:
    class Experiment:
        def add_video(self, tag, pictures, step, fps) -> None:
            shown.append((tag, pictures[0, :, 0, 0, 0].tolist(), tuple(pictures.shape), step, fps))

    class Board(CSVLogger):
        @property
        def experiment(self):
            return Experiment()

        def log_metrics(self, metrics, step=None) -> None:
            pass

        def save(self) -> None:
            pass

        def finalize(self, status) -> None:
            pass

    shown = []
    monkeypatch.setattr("lit_collect.callbacks.episode_video.find_spec", lambda name: there or None)
    video = EpisodeVideo(format="gif")
    trainer_with(video, logger=Board(tmp_path)).fit(Evaluated(), datamodule=screens())
    assert shown == ([("eval/video", greys(video.paths[0]), (1, 6, 3, 16, 24), 1, 10.0)] if there else [])


def test_own_evaluation_of_the_user_is_left_alone(trainer_with, evaluated_data, evaluated_learner) -> None:
    video = EpisodeVideo(format="gif")
    trainer_with(CollectionMonitor(), video).fit(evaluated_learner, datamodule=evaluated_data(batches=1))
    assert video.paths == []


@pytest.mark.parametrize(
    ("format", "package"), [("mp4", "imageio-ffmpeg or opencv-python-headless"), ("gif", "pillow")]
)
def test_missing_package_is_named_before_anything_runs(trainer_with, monkeypatch, format, package) -> None:
    monkeypatch.setattr("lit_collect.callbacks._video_files.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package {package} .*lit_collect\[video\]"):
        trainer_with(EpisodeVideo(format=format)).fit(Evaluated(), datamodule=screens())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_evaluations": 0}, "video.every_n_evaluations must be at least 1, got 0"),
        ({"num_episodes": 0}, "video.num_episodes must be at least 1, got 0"),
        ({"max_frames": 0}, "video.max_frames must be at least 1, got 0"),
        ({"fps": 0}, "video.fps must be above 0 or None, got 0"),
        ({"format": "avi"}, r"video.format must be one of \('mp4', 'gif'\), got 'avi'"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EpisodeVideo(**settings)
