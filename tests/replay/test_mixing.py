"""`MixedBuffer`: two buffers in one sample."""

import pytest
import torch
from tensordict import TensorDict

from lit_collect import FrameContractError
from lit_collect.frames import INDEX, MASK, N_STEPS, NEXT_REWARD, OFFLINE, WEIGHT, WRITTEN
from lit_collect.replay import MixedBuffer, NStep, ReplayBuffer, SliceSampler


def filled(first, count=20, sampler="uniform", batch_size=8, **more):
    buffer = ReplayBuffer(64, batch_size, sampler=sampler, seed=0)
    buffer.extend(rows(first, count, **more))
    return buffer


def rows(first, count, **more):
    number = torch.arange(first, first + count)
    ids = {"traj_ids": torch.zeros(count, dtype=torch.int64)}
    return TensorDict({"observation": number, "collector": ids, **more}, batch_size=[count])


class Fixed:
    """Gives the same rows always, without saying where they lie."""

    def sample(self, batch_size):
        return rows(-batch_size, batch_size)


class Other:
    """Gives rows of another dtype."""

    def sample(self, batch_size):
        given = rows(0, batch_size)
        return given.set("observation", given["observation"].float())


@pytest.mark.parametrize(("fraction", "online"), [(0.5, 8), (0.25, 4), (0.0, 0), (1.0, 16)])
def test_sample_then_has_rows_of_both(fraction, online):
    sample = MixedBuffer(filled(0), filled(100), fraction=fraction).sample(16)
    assert sample.batch_size == (16,)
    assert sample[OFFLINE].tolist() == [False] * online + [True] * (16 - online)
    assert torch.equal(sample["observation"] >= 100, sample[OFFLINE])


def test_sample_then_has_the_keys_of_both():
    mixed = MixedBuffer(filled(0, value=torch.zeros(20)), filled(100, score=torch.zeros(20)))
    assert {"value", "score"}.isdisjoint(mixed.sample().keys())


def test_sample_with_an_offline_part_of_any_kind_then_fills_what_it_lacks():
    sample = MixedBuffer(filled(0, sampler="prioritized"), Fixed()).sample(8)
    assert sample["observation"][4:].tolist() == [-4, -3, -2, -1]
    assert (sample[INDEX][4:] == -1).all()
    assert (sample[WRITTEN][4:] == -1).all()
    assert (sample[WEIGHT][4:] == 1).all()
    assert torch.equal(sample[INDEX][:4], sample["observation"][:4])


def rewarded(*transforms):
    """Twenty rows of an episode, each with reward 1."""
    buffer = ReplayBuffer(64, 8, transforms=transforms, seed=0)
    following = {"reward": torch.ones(20, 1), "done": torch.arange(20)[:, None] == 19}
    buffer.extend(rows(0, 20, next=TensorDict(following, batch_size=[20])))
    return buffer


@pytest.mark.parametrize("swapped", [False, True])
def test_sample_when_one_part_sums_rewards_then_rows_of_the_other_are_of_one_step(swapped):
    parts = [rewarded(NStep(3, 1.0)), rewarded()]
    sample = MixedBuffer(*parts[:: -1 if swapped else 1]).sample(400)
    summed = sample[OFFLINE] == swapped
    assert (sample[N_STEPS][~summed] == 1).all()
    assert sample[N_STEPS][summed].max() == 3
    assert torch.equal(sample[NEXT_REWARD][:, 0], sample[N_STEPS].float())


def test_sample_when_parts_sum_other_numbers_of_rewards_then_each_row_says_its_own():
    sample = MixedBuffer(rewarded(NStep(3, 1.0)), rewarded(NStep(5, 1.0))).sample(400)
    assert [sample[N_STEPS][sample[OFFLINE] == offline].max() for offline in (False, True)] == [3, 5]
    assert torch.equal(sample[NEXT_REWARD][:, 0], sample[N_STEPS].float())


def test_mixed_buffer_when_parts_sum_with_other_discounts_then_is_refused():
    with pytest.raises(ValueError, match=r"same discount, got NStep with gamma=0.99 online and gamma=0.9 offline"):
        MixedBuffer(rewarded(NStep(3, 0.99)), rewarded(NStep(5, 0.9)))
    MixedBuffer(rewarded(NStep(3, 0.99)), rewarded(NStep(1, 0.9)))  # one reward is not discounted


@pytest.mark.parametrize("swapped", [False, True])
def test_sample_when_slices_of_one_part_are_padded_then_the_others_are_marked_whole(swapped):
    padded = ReplayBuffer(64, 16, sampler=SliceSampler(8, strict_length=False), seed=0)
    padded.extend(rows(0, 3))
    whole = ReplayBuffer(64, 16, slice_len=8, seed=0)
    whole.extend(rows(100, 20))
    sample = MixedBuffer(*(whole, padded)[:: 1 if swapped else -1]).sample()
    lengths = sample[MASK].sum(1)[sample[OFFLINE][:, 0].argsort(descending=not swapped, stable=True)]
    assert lengths.tolist() == [8, 3]


MASKS = torch.ones(20, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("key", "more"),
    [("action_mask", {"action_mask": MASKS}), ("next.action_mask", {"next": TensorDict({"action_mask": MASKS}, [20])})],
)
@pytest.mark.parametrize("lacking", ["online", "offline"])
def test_sample_when_one_part_has_no_action_masks_then_is_refused(lacking, key, more):
    parts = {"online": filled(0, **more), "offline": filled(100, **more), lacking: filled(200)}
    with pytest.raises(FrameContractError, match=f"'{key}' must be in the rows of both .* the {lacking} rows lack it"):
        MixedBuffer(**parts).sample()


def test_sample_when_both_parts_have_action_masks_then_has_them():
    sample = MixedBuffer(filled(0, action_mask=MASKS), filled(100, action_mask=~MASKS)).sample()
    assert torch.equal(sample["action_mask"][:, 0], ~sample[OFFLINE])


def test_extend_then_goes_online():
    online, offline = filled(0), filled(100)
    mixed = MixedBuffer(online, offline)
    mixed.extend(rows(20, 5))
    assert (len(mixed), len(online), len(offline)) == (25, 25, 20)


def test_update_priority_then_goes_to_the_part_of_each_row():
    online, offline = filled(0, sampler="prioritized"), filled(100, sampler="prioritized")
    mixed = MixedBuffer(online, offline, batch_size=400)
    sample = mixed.sample()
    chosen = (sample["observation"] == 3) | (sample["observation"] == 107)
    mixed.update_priority(sample, torch.where(chosen, 1e6, 1e-6)[:, None])
    assert (online.sample(64)["observation"] == 3).double().mean() > 0.9
    assert (offline.sample(64)["observation"] == 107).double().mean() > 0.9


def test_update_priority_with_one_part_without_then_leaves_it_alone():
    mixed = MixedBuffer(filled(0, sampler="prioritized"), Fixed())
    mixed.update_priority(mixed.sample(), torch.ones(8))
    with pytest.raises(TypeError, match="priorities of a mixed buffer go with the sample"):
        mixed.update_priority(torch.arange(8), torch.ones(8))


@pytest.mark.parametrize("count", [0, 1, 7, 9])
def test_update_priority_with_another_number_of_them_then_is_refused_and_none_changed(count):
    online, offline = filled(0, sampler="prioritized"), filled(100, sampler="prioritized")
    mixed = MixedBuffer(online, offline)
    before = [part.state_dict()["sampler"]["priorities"].clone() for part in (online, offline)]
    with pytest.raises(ValueError, match=f"one for each row : expected 8, got {count}; no priority was changed"):
        mixed.update_priority(mixed.sample(), torch.full((count,), 5.0))
    for part, priorities in zip((online, offline), before, strict=True):
        assert torch.equal(part.state_dict()["sampler"]["priorities"], priorities)


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_update_priority_with_a_wrong_one_in_either_part_then_none_is_changed(place, wrong):
    online, offline = filled(0, sampler="prioritized"), filled(100, sampler="prioritized")
    mixed = MixedBuffer(online, offline)
    before = [part.state_dict()["sampler"]["priorities"].clone() for part in (online, offline)]
    priority = torch.full((8,), 5.0)
    priority[place] = wrong
    with pytest.raises(ValueError, match=f"finite and not negative, got {wrong}; no priority was changed"):
        mixed.update_priority(mixed.sample(), priority)
    for part, priorities in zip((online, offline), before, strict=True):
        assert torch.equal(part.state_dict()["sampler"]["priorities"], priorities)


def test_has_priorities_when_one_part_has_then_both_do():
    assert MixedBuffer(filled(0), filled(100, sampler="prioritized")).has_priorities
    assert not MixedBuffer(filled(0), Fixed()).has_priorities


def test_extend_with_a_mixed_sample_then_takes_only_its_rows():
    online = filled(0, sampler="prioritized")
    mixed = MixedBuffer(online, filled(100))
    sample = mixed.sample()
    positions = mixed.extend(sample)
    assert torch.equal(online[positions]["observation"], sample["observation"])
    assert set(online[positions].keys(True, True)) == {"observation", ("collector", "traj_ids")}


def test_slices_then_are_mixed_whole():
    parts = []
    for first in (0, 100):
        parts.append(ReplayBuffer(64, 16, slice_len=4, seed=0))
        parts[-1].extend(rows(first, 20))
    mixed = MixedBuffer(*parts, fraction=0.4)
    sample = mixed.sample()
    assert sample.batch_size == (4, 4)
    assert sample[OFFLINE][:, 0].tolist() == [False, False, True, True]
    assert sample[OFFLINE].shape == (4, 4)
    mixed.update_priority(sample, torch.ones(4, 4))


def test_can_sample_then_asks_both():
    assert MixedBuffer(filled(0), filled(100)).can_sample()
    assert MixedBuffer(filled(0), Fixed()).can_sample()
    assert not MixedBuffer(ReplayBuffer(8), filled(100)).can_sample()
    assert MixedBuffer(ReplayBuffer(8), filled(100), fraction=0.0).can_sample()


def test_mixed_buffer_then_passes_on_what_is_about_the_online_part():
    mixed = MixedBuffer(filled(0), filled(100), fraction=0.25)
    mixed.learner_version = 3
    assert (mixed.learner_version, mixed.online.learner_version, mixed.takes_batches) == (3, 3, True)
    mixed.sample()
    assert mixed.take_statistics()["sampled"] == 2
    mixed.close()
    with pytest.raises(ValueError, match="the replay buffer is closed"):
        mixed.sample()
    assert len(mixed.offline) == 20


def test_state_then_is_that_of_the_online_part():
    mixed, other = MixedBuffer(filled(0), filled(100)), MixedBuffer(filled(50), filled(100))
    other.load_state_dict(mixed.state_dict())
    assert torch.equal(other.online[:]["observation"], mixed.online[:]["observation"])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MixedBuffer(Fixed(), filled(0)), TypeError, r"online must have extend and sample : got Fixed without"),
        (lambda: MixedBuffer(filled(0), 3), TypeError, "offline must have sample : got int"),
        (
            lambda: MixedBuffer(filled(0), Fixed(), fraction=1.5),
            ValueError,
            "fraction must be between 0 and 1, got 1.5",
        ),
        (lambda: MixedBuffer(filled(0), Fixed(), fraction="x"), TypeError, "fraction must be a number, got 'x'"),
        (lambda: MixedBuffer(filled(0), Fixed(), fraction=None), TypeError, "fraction must be a number, got None"),
        (lambda: MixedBuffer(filled(0), Fixed(), batch_size=0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: MixedBuffer(filled(0), Fixed()).sample(0), ValueError, "batch_size must be an integer of at least 1"),
        (
            lambda: MixedBuffer(filled(0), Other()).sample(),
            FrameContractError,
            "'observation' must be the same in both parts, got torch.int64",
        ),
    ],
)
def test_wrong_use_then_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
