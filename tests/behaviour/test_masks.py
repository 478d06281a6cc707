"""Actions that an env forbids are never taken, and the mask that a policy saw belongs to the observation it saw."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, distributions, nn

from lit_collect import Collector, ProcessBackend, RolloutConfig, check_batch, masked_logits
from lit_collect.errors import FrameContractError
from lit_collect.frames import flatten_rows, valid_rows
from lit_collect.testing import CountingEnv

COPIES, T, BATCHES = 3, 40, 9  # 1,080 steps
LENGTHS = (4, 1, 7)
CHOICE, CHOICES = spaces.Discrete(5, start=2), spaces.MultiDiscrete([3, 4])


def sizes_of(space: Any) -> list[int]:
    return [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()


def mask_of(observation: Any, sizes: list[int]) -> np.ndarray:
    """[A] bool, another mask for each frame of each copy; every choice has something that is allowed."""
    index, episode, step = (int(value) for value in observation)
    masks = []
    for position, size in enumerate(sizes):
        bits = 1 + (index * 7 + episode * 31 + step * 13 + position * 5) * 2654435761 % (2**size - 1)
        masks.append([bool(bits >> bit & 1) for bit in range(size)])
    return np.concatenate(masks)


class Guarded(CountingEnv):
    """Says what is allowed, and raises on anything else. After the end of an episode nothing may be allowed."""

    def __init__(self, index: int, space: Any = CHOICE, *, nothing_at_the_end: bool = False, where: str = "info"):
        super().__init__(index, LENGTHS, action_space=space)
        self._sizes, self._nothing_at_the_end, self._where = sizes_of(space), nothing_at_the_end, where
        if where == "observation":
            mask = spaces.Box(0, 1, (sum(self._sizes),), np.int8)
            self.observation_space = spaces.Dict({"observation": self.observation_space, "action_mask": mask})

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed, options=options)
        return self.shown(observation)

    def step(self, action):
        start = getattr(self.action_space, "start", 0)
        picked = np.atleast_1d(action) - start
        offsets = np.cumsum([0, *self._sizes[:-1]])
        if not self.mask[offsets + picked].all():
            raise ValueError(f"forbidden action {action}, mask {self.mask}")
        observation, *rest = super().step(action)
        observation, info = self.shown(observation)
        return observation, *rest[:3], info

    def shown(self, observation: np.ndarray) -> tuple[Any, dict[str, Any]]:
        self.mask = mask_of(observation, self._sizes)
        if self.finished and self._nothing_at_the_end:
            self.mask[:] = False
        mask = self.mask.astype(np.int8)
        if self._where == "observation":
            return {"observation": observation, "action_mask": mask}, {}
        return observation, {"action_mask": mask}


class Forgetful(SyncVectorEnv):
    """Spends a step on each reset, because nobody knows that it could do otherwise."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)


def copies(**options: Any) -> list[Callable[[], Guarded]]:
    return [partial(Guarded, index, **options) for index in range(COPIES)]


def vector(kind: type[SyncVectorEnv], mode: AutoresetMode, **options: Any) -> gymnasium.vector.VectorEnv:
    return kind(copies(**options), autoreset_mode=mode)


SOURCES: dict[str, Callable[..., Any]] = {
    "single envs": copies,
    "disabled": lambda **options: partial(vector, SyncVectorEnv, AutoresetMode.DISABLED, **options),
    "same step": lambda **options: partial(vector, SyncVectorEnv, AutoresetMode.SAME_STEP, **options),
    "next step": lambda **options: partial(vector, SyncVectorEnv, AutoresetMode.NEXT_STEP, **options),
    "next step with spent rows": lambda **options: partial(vector, Forgetful, AutoresetMode.NEXT_STEP, **options),
}


class Masked(nn.Module):
    """Logits of a net under the mask; tells which mask it was given."""

    def __init__(self, actions: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(3, actions)

    def forward(self, observation: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
        assert action_mask.dtype is torch.bool
        return {"logits": masked_logits(self.layer(observation / 20), action_mask), "given": action_mask}


class MaskedDistribution(Masked):
    """The same as a distribution, with minus infinity where an action is forbidden."""

    def forward(self, observation: Tensor, action_mask: Tensor) -> distributions.Distribution:
        logits = self.layer(observation / 20).masked_fill(~action_mask, -torch.inf)
        return distributions.Categorical(logits=logits)


class MaskedChoices(Masked):
    """Draws each of two choices by itself."""

    def __init__(self) -> None:
        super().__init__(sum(sizes_of(CHOICES)))

    def forward(self, observation: Tensor, *, action_mask: Tensor) -> dict[str, Tensor]:
        logits = masked_logits(self.layer(observation / 20), action_mask).split(sizes_of(CHOICES), -1)
        drawn = [distributions.Categorical(logits=part).sample() for part in logits]
        return {"action": torch.stack(drawn, -1), "given": action_mask}


def tensordict_actor(*, hooked: bool = False) -> ProbabilisticTensorDictSequential:
    net = nn.Linear(3, 5)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda x, mask: masked_logits(net(x / 20), mask), ["observation", "action_mask"], ["logits"]),
        TensorDictModule(lambda mask: mask.clone(), ["action_mask"], ["given"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    )
    if hooked:
        policy.register_forward_hook(lambda module, args, out: out)
    return policy


POLICIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "random": (lambda: None, CHOICE),
    "random, several choices": (lambda: None, CHOICES),
    "module": (Masked, CHOICE),
    "distribution": (MaskedDistribution, CHOICE),
    "several choices": (MaskedChoices, CHOICES),
    "tensordict, lowered": (tensordict_actor, CHOICE),
    "tensordict as it is": (partial(tensordict_actor, hooked=True), CHOICE),
}


def collect(env: Any, policy: Any, batches: int = BATCHES, **options: Any) -> TensorDict:
    torch.manual_seed(0)
    with Collector(env, policy, frames_per_batch=COPIES * T, num_envs=COPIES, seed=4, **options) as collector:
        made = [collector.collect() for _ in range(batches)]
    for batch in made:
        check_batch(batch)
    return torch.cat(made, 1)


def expected_masks(observations: Tensor, space: Any) -> Tensor:
    rows = observations.flatten(0, -2).numpy()
    return torch.from_numpy(np.stack([mask_of(row, sizes_of(space)) for row in rows])).unflatten(
        0, observations.shape[:-1]
    )


def check_masks(batch: TensorDict, space: Any) -> None:
    """Masks belong to their observations, and what was taken was allowed."""
    valid = valid_rows(batch)
    valid = torch.ones(batch.shape, dtype=torch.bool) if valid is None else valid
    assert torch.equal(batch["action_mask"][valid], expected_masks(batch["observation"], space)[valid])
    following = expected_masks(batch["next", "observation"], space)
    assert torch.equal(batch["next", "action_mask"][valid], following[valid])
    if "given" in batch:
        assert torch.equal(batch["given"], batch["action_mask"])
    if "log_prob" in batch:
        assert batch["log_prob"].isfinite().all()
    assert valid.sum() >= 700
    assert batch["next", "done"].sum() > 150


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("source", SOURCES)
def test_masked_action_is_never_taken(source, name):
    make, space = POLICIES[name]
    batch = collect(SOURCES[source](space=space), make())
    check_masks(batch, space)
    assert (valid_rows(batch) is not None) == (source == "next step with spent rows")


@pytest.mark.parametrize("source", SOURCES)
def test_mask_among_the_observations_holds_for_random_actions_too(source):
    batch = collect(SOURCES[source](where="observation"), None)
    rows = flatten_rows(batch)
    assert torch.equal(rows["action_mask"].bool(), expected_masks(rows["observation"], CHOICE))


def test_mask_among_the_observations_reaches_a_policy_in_the_mapping_and_by_keyword():
    def policy(observation: Any, action_mask: Tensor) -> dict[str, Tensor]:
        assert torch.equal(observation["action_mask"].bool(), action_mask)
        return {"logits": masked_logits(torch.zeros(COPIES, 5), action_mask)}

    assert collect(copies(where="observation"), policy, 1)["log_prob"].isfinite().all()


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "next step with spent rows"])
@pytest.mark.parametrize("name", ["random", "module", "distribution", "tensordict, lowered"])
def test_ended_episode_that_allows_nothing_is_no_trouble(source, name):
    batch = collect(SOURCES[source](nothing_at_the_end=True), POLICIES[name][0](), 2)
    ended = batch["next", "done"].squeeze(-1)
    assert not batch["next", "action_mask"][ended].any()
    assert batch["next", "action_mask"][~ended].any(-1).all()


@pytest.mark.parametrize("name", ["random", "module", "tensordict, lowered"])
def test_row_that_is_spent_on_resetting_may_allow_nothing(name):
    batch = collect(SOURCES["next step with spent rows"](nothing_at_the_end=True), POLICIES[name][0](), 3)
    valid = valid_rows(batch)
    assert batch["action_mask"][valid].any(-1).all()
    assert not batch["action_mask"][~valid].any()


@pytest.mark.parametrize("source", SOURCES)
def test_random_frames_at_first_are_allowed_too(source):
    batch = collect(SOURCES[source](), Masked(), 4, rollout=RolloutConfig(init_random_frames=COPIES * T * 2))
    versions = batch["collector", "policy_version"]
    assert (versions[:, : 2 * T] == -1).all()
    assert (versions[:, 2 * T :] == 0).all()
    assert not batch["logits"][:, : 2 * T].any()
    assert batch["logits"][:, 2 * T :].any(-1).all()


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("name", ["random", "module", "tensordict, lowered"])
def test_workers_give_what_one_process_gives(name):
    make, space = POLICIES[name]
    batches = []
    for backend in ("direct", ProcessBackend(num_collectors=1), ProcessBackend(num_collectors=COPIES)):
        torch.manual_seed(1)
        batches.append(collect(copies(space=space), make(), backend=backend))
        check_masks(batches[-1], space)
    assert (batches[0] == batches[1]).all()


def test_env_without_a_mask_is_told_what_the_policy_misses():
    message = "policy takes an action_mask, but the env's reset info has none"
    collector = Collector(partial(CountingEnv, 0), Masked(2), frames_per_batch=4)
    with collector, pytest.raises(FrameContractError, match=message):
        collector.collect()
