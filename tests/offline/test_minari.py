"""Minari data sets: there and back, and for Minari alone."""

import socket
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import RolloutConfig
from lit_collect.errors import FrameContractError, LitCollectError
from lit_collect.frames import check_batch
from lit_collect.offline.minari import MinariRows, MinariWriter, dataset_id, find_minari
from lit_collect.testing import ConstantPolicy, CountingEnv
from tests.offline.conftest import Everything
from tests.tools.envs import Masked

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

LABELS = (("collector", "traj_ids"), ("collector", "policy_version"))  # are those of the data set
UNREAD = "ignore:the texts .* are not stored"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing is downloaded, and no home folder is looked into."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Minari's own folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    return tmp_path / "root"


def write(path, collector, episodes, **settings):
    spaces = collector.observation_space
    writer = MinariWriter(path, spaces, action_space=collector.action_space, **settings)
    writer.write(episodes[:2])
    writer.write(episodes[2:])
    return writer


def assert_same_rows(written, read):
    assert len(written) == len(read)
    for number, (one, other) in enumerate(zip(written, read, strict=True)):
        check_batch(other)
        assert (other["collector", "traj_ids"] == number).all()
        for key in other.keys(True, True):
            if key not in LABELS:
                assert one[key].dtype == other[key].dtype, key
                assert torch.equal(one[key], other[key]), key


@pytest.mark.filterwarnings(UNREAD)
def test_every_kind_of_space_comes_back_as_it_was(tmp_path, play):
    collector, episodes = play(Everything, frames=63, per_batch=21, num_envs=3)
    write(tmp_path / "all-v0", collector, episodes)
    data = MinariRows(tmp_path / "all-v0")
    assert data.num_rows == 63
    assert data.action_spec["spaces"]["gear"] == {"kind": "discrete", "n": 3, "start": 5}
    assert "word" not in data.observation_spec["spaces"]
    read = list(data.episodes())
    assert {len(episode) for episode in read} == {1, 2, 3}
    unchanged = [key for key in read[0].keys(True, True) if key != ("action", "push")]
    assert_same_rows([episode.select(*unchanged) for episode in episodes], [one.select(*unchanged) for one in read])
    assert ("next", "image") in unchanged
    assert ("action", "levers") in unchanged
    for one, other in zip(episodes, read, strict=True):  # the env was given less
        assert torch.equal(one["action", "push"].clamp(-0.5, 0.5), other["action", "push"])


@pytest.mark.filterwarnings(UNREAD)
def test_minari_has_what_the_env_gave_and_took(tmp_path, play):
    env = Everything()
    collector, episodes = play(env, frames=12, per_batch=12)
    write(tmp_path / "root" / "deep" / "all-v3", collector, episodes)
    data = minari.load_dataset("deep/all-v3")
    assert data.total_steps == 12
    assert data.observation_space["choice"] == spaces.Discrete(100, start=-50)
    assert data.observation_space["pair"] == env.observation_space["pair"]
    assert data.action_space == env.action_space
    taken = iter(env.taken)
    for number, episode in enumerate(data.iterate_episodes()):
        steps = len(episode.rewards)
        numbers = [10 * number + step for step in range(steps + 1)]
        assert episode.observations["choice"].tolist() == [number - 50 for number in numbers]
        assert episode.observations["image"][:, 0, 0, 1].tolist() == [(7 + number) % 256 for number in numbers]
        assert episode.observations["pair"][0].dtype == np.float64
        assert episode.rewards.dtype == np.float64
        assert episode.rewards.tolist() == [1.5 * (step + 1) for step in range(steps)]
        assert episode.truncations[-1]
        for step in range(steps):
            action = next(taken)
            assert episode.actions["gear"][step] == action["gear"]
            assert episode.actions["levers"][step].tolist() == action["levers"].tolist()
            assert episode.actions["push"][step].tolist() == action["push"].tolist()
    assert next(taken, None) is None


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_flags_of_an_end_are_kept_and_an_unfinished_episode_is_truncated(tmp_path, play, ends):
    collector, episodes = play(lambda: CountingEnv(0, (1, 4), ends=ends), frames=7, per_batch=7)
    write(tmp_path / "count-v0", collector, episodes)
    data = minari.MinariDataset(tmp_path / "count-v0" / "data")
    flags = [(episode.terminations.tolist(), episode.truncations.tolist()) for episode in data.iterate_episodes()]
    last = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}[ends]
    whole = [tuple([False] * (length - 1) + [flag] for flag in last) for length in (1, 4, 1)]
    assert flags == [*whole, ([False], [True])]
    assert_same_rows(episodes, list(MinariRows(tmp_path / "count-v0").episodes()))


def test_dotted_names_lie_where_minari_looks(tmp_path, root):
    assert dataset_id(tmp_path / "elsewhere" / "cartpole-v0") == "cartpole-v0"
    assert dataset_id(root / "mine" / "cartpole-v12") == "mine/cartpole-v12"
    for name in ("cartpole", "cart pole-v0", "cartpole-v"):
        with pytest.raises(ValueError, match="such as 'cartpole-v0'"):
            dataset_id(tmp_path / name)


def test_data_are_found_by_folder_files_and_id(tmp_path, root, play):
    collector, episodes = play(CountingEnv)
    write(root / "mine" / "count-v0", collector, episodes)
    files = root / "mine" / "count-v0" / "data"
    for path in (files, files.parent, "mine/count-v0"):
        assert find_minari(path) == files
    assert find_minari(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="there is no Minari data set at other-v0"):
        MinariRows("other-v0")


def test_env_is_recovered_if_it_can_be_made_again(tmp_path, play):
    collector, episodes = play("CartPole-v1")
    spec = gymnasium.make("CartPole-v1", max_episode_steps=7).spec
    write(tmp_path / "one-v0", collector, episodes, env_spec=spec)
    env = minari.MinariDataset(tmp_path / "one-v0" / "data").recover_environment()
    assert env.spec.max_episode_steps == 7
    env.close()
    spec.kwargs["made_by"] = object()
    write(tmp_path / "two-v0", collector, episodes, env_spec=spec)
    assert minari.MinariDataset(tmp_path / "two-v0" / "data").env_spec is None


@pytest.mark.filterwarnings(UNREAD)
def test_infos_and_action_masks_come_back(tmp_path, play):
    keys = ("deep.level:int64", "level")
    collector, episodes = play(Everything, frames=10, per_batch=10, rollout=RolloutConfig(info_keys=keys))
    write(tmp_path / "all-v0", collector, episodes, info_keys=keys)
    (first, second) = list(MinariRows(tmp_path / "all-v0", keys).episodes())[:2]
    for read, written in ((first, episodes[0]), (second, episodes[1])):
        for key in ("level", ("deep", "level"), ("reported", "level"), ("reported", "deep", "level")):
            for place in (key, ("next", *key) if isinstance(key, tuple) else ("next", key)):
                assert torch.equal(read[place].nan_to_num(-1.0), written[place].nan_to_num(-1.0))
                assert read[place].dtype == written[place].dtype
    assert next(MinariRows(tmp_path / "all-v0").episodes()).get("level", None) is None

    collector, episodes = play(Masked)
    write(tmp_path / "masked-v0", collector, episodes)
    assert next(MinariRows(tmp_path / "masked-v0").episodes()).get("action_mask", None) is not None
    assert_same_rows(episodes, list(MinariRows(tmp_path / "masked-v0").episodes()))


def test_texts_come_back_where_they_are_asked_for(tmp_path, play):
    keys = ("word:str",)
    collector, episodes = play(Everything, frames=10, per_batch=10, rollout=RolloutConfig(info_keys=keys))
    write(tmp_path / "all-v0", collector, episodes, info_keys=keys)
    plain = minari.MinariDataset(tmp_path / "all-v0" / "data")[1]
    assert plain.observations["word"] == ["abcd", "abcde", ""]
    for one, other in zip(episodes, MinariRows(tmp_path / "all-v0", keys).episodes(), strict=True):
        assert torch.equal(one["word"], other["word"])


def test_an_info_that_is_not_there_is_filled(tmp_path, play):
    collector, episodes = play(CountingEnv)
    write(tmp_path / "count-v0", collector, episodes)
    episode = next(MinariRows(tmp_path / "count-v0", ["speed", "gear:int32[2]"]).episodes())
    assert episode["speed"].isnan().all()
    assert episode["gear"].tolist() == [[0, 0]] * 3
    assert not episode["next", "reported", "speed"].any()


def of_others(path, **changes):
    """A data set that Minari itself has written."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    path.mkdir(parents=True)
    storage = MinariStorage.new(path, spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(2, start=1))
    storage.update_metadata({"dataset_id": "others-v0", "minari_version": minari.__version__})
    given = {
        "observations": [np.array([0.0, step / 8]) for step in range(4)],
        "actions": [1, 2, 1],
        "rewards": [0, 1, 2],
        "terminations": [False, False, False],
        "truncations": [False, False, False],
        "infos": {"speed": [0.5, 1.5, 2.5, 3.5]},
    }
    storage.update_episodes([EpisodeBuffer(**{**given, **changes})])
    return path


def test_data_of_others_are_read(tmp_path):
    (episode,) = MinariRows(of_others(tmp_path / "data"), ["speed"]).episodes()
    check_batch(episode)
    assert episode["observation"].tolist() == [[0.0, 0.0], [0.0, 0.125], [0.0, 0.25]]
    assert episode["next", "observation"][-1].tolist() == [0.0, 0.375]
    assert episode["observation"].dtype == torch.float32
    assert episode["action"].tolist() == [0, 1, 0]
    assert episode["next", "speed"].tolist() == [1.5, 2.5, 3.5]
    assert episode["next", "truncated"].squeeze(-1).tolist() == [False, False, True]  # nobody says how it ended


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": [np.zeros(2)] * 3}, r"episode 0 of .*observation does not fit : .*\(4, 2\), got .*\(3, 2\)"),
        ({"actions": [1, 2, 1, 2]}, r"action does not fit : expected int64 with shape \(3,\)"),
        ({"infos": {"speed": np.ones((4, 2))}}, r"speed does not fit : expected float32 with shape \(4,\)"),
    ],
)
def test_episodes_that_are_no_episodes_are_told(tmp_path, changes, message):
    with pytest.raises(FrameContractError, match=message):
        list(MinariRows(of_others(tmp_path / "data", **changes), ["speed"]).episodes())


def test_a_file_that_was_cut_off_is_told(tmp_path):
    file = of_others(tmp_path / "data") / "main_data.hdf5"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(LitCollectError, match="may have been cut off while it was written"):
        list(MinariRows(tmp_path / "data").episodes())


def test_a_data_set_that_minari_refuses_is_told(tmp_path):
    metadata = of_others(tmp_path / "data") / "metadata.json"
    metadata.write_text(metadata.read_text().replace(minari.__version__, "9.9"))
    with pytest.raises(LitCollectError, match=r"cannot be read: .*does not support"):
        MinariRows(tmp_path / "data")


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    box = spaces.Box(0, 1, (1,))
    odd = spaces.Dict({"left/right": box})
    with pytest.raises(ValueError, match=r"\('left/right',\) cannot be written by Minari"):
        MinariWriter(tmp_path / "odd-v0", odd, action_space=box)
    assert not (tmp_path / "odd-v0").exists()
    (tmp_path / "full-v0").mkdir()
    (tmp_path / "full-v0" / "thesis.txt").write_text("all of it")
    with pytest.raises(FileExistsError, match="is not empty"):
        MinariWriter(tmp_path / "full-v0", box, action_space=box)


def test_a_missing_package_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"need the package h5py .*pip install 'lit_collect\[minari\]'"):
        MinariWriter(tmp_path / "one-v0", spaces.Box(0, 1, (1,)), action_space=spaces.Discrete(2))


def test_a_full_disk_is_told(tmp_path, play, monkeypatch):
    collector, episodes = play(CountingEnv)
    writer = write(tmp_path / "count-v0", collector, episodes)
    (tmp_path / "count-v0" / "data" / "main_data.hdf5").chmod(0o400)
    (tmp_path / "count-v0" / "data" / "main_data.hdf5").unlink()
    (tmp_path / "count-v0" / "data" / "main_data.hdf5").mkdir()  # nothing can be written there either
    with pytest.raises(OSError, match=f"{len(episodes)} episodes could not be written"):
        writer.write(episodes)


def test_actions_of_a_policy_are_those_of_the_env(tmp_path, play):
    env = CountingEnv(action_space=spaces.Box(-1, 1, (2,), np.float32))
    collector, episodes = play(env, frames=6, per_batch=6, policy=ConstantPolicy([0.5, 3.0]))
    write(tmp_path / "count-v0", collector, episodes)
    assert minari.MinariDataset(tmp_path / "count-v0" / "data")[0].actions.tolist() == [[0.5, 1.0]] * 3
