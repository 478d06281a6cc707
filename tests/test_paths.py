"""Dotted paths into a worker's objects."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_collect.paths import call, first_name, nearest, resolve


class Gearbox:
    """Has something of every kind that a path may meet."""

    def __init__(self) -> None:
        self.gears = [1, 2, 5]
        self.by_name = {"low": 10, "it's": 11, "a.b[0]": 12, "": 13, 0: 14}
        self.weights = np.arange(6.0).reshape(2, 3)
        self._hidden = 7

    @property
    def oil(self) -> float:
        return self.level  # no such thing: the property itself fails

    @property
    def stuck(self) -> float:
        raise RuntimeError("the gearbox is stuck")

    def shift(self, gear: int, by: int = 1) -> int:
        return gear + by


@pytest.fixture
def root() -> dict[str, Any]:
    box = Gearbox()
    return {
        "env": SimpleNamespace(envs=[SimpleNamespace(unwrapped=box)], box=box),
        "größe": 3,
        "few": {"high": 2, "low": 1, "_own": 0},
        "empty": {},
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("env.envs[0].unwrapped.gears[-1]", 5),
        ("env.envs[-1].unwrapped.gears[1]", 2),
        ("env.box.by_name['low']", 10),
        ('env.box.by_name["it\'s"]', 11),
        ("env.box.by_name['a.b[0]']", 12),
        ("env.box.by_name['']", 13),
        ("env.box.by_name[0]", 14),
        ("env.box.weights[1][2]", 5.0),
        ("env.box._hidden", 7),
        ("größe", 3),
    ],
)
def test_resolve_follows_names_indices_and_keys(path, value, root):
    assert resolve(root, path) == value


@pytest.mark.parametrize(
    ("path", "position"),
    [
        ("", 0),
        (" env", 0),
        (".env", 0),
        ("[0]", 0),
        ("0", 0),
        ("env.", 3),
        ("env..box", 3),
        ("env box", 3),
        ("env\n", 3),
        ("env.0", 3),
        ("env-box", 3),
        ("env.box()", 7),
        ("env.box.shift(1)", 13),
        ("env.envs[0]unwrapped", 11),
        ("env.envs[]", 8),
        ("env.envs[ 0]", 8),
        ("env.envs[0", 8),
        ("env.envs[1:2]", 8),
        ("env.envs[1+1]", 8),
        ("env.envs[--1]", 8),
        ("env.envs[٣]", 8),
        ("env.envs[" + "9" * 5000 + "]", 8),
        ("env.envs[low]", 8),
        ("env.envs['low\"]", 8),
        (r"env.envs['\x41']", 8),
        ("env.envs[f'low']", 8),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_resolve_refuses_a_malformed_path(path, position, root):
    with pytest.raises(ValueError, match=rf"malformed at position {position} : expected names with a dot between"):
        resolve(root, path)


@pytest.mark.parametrize("path", [None, 3, b"env.envs", ["env"]], ids=repr)
def test_resolve_refuses_what_is_no_text(path, root):
    with pytest.raises(TypeError, match=r"a path is no text : expected names .*, got "):
        resolve(root, path)


@pytest.mark.parametrize(
    "path", ["__class__", "env.__class__", "env.box.__dict__['gears']", "env.box.shift.__globals__"]
)
def test_resolve_refuses_names_of_pythons_own(path, root):
    root["__class__"] = 1
    with pytest.raises(ValueError, match=r"is refused : expected no name with two underscores around, got '__\w+__'$"):
        resolve(root, path)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("evn.b", KeyError, "'evn.b' leads nowhere : expected it to begin with one of env, {}"),
        (
            "env.box.geers[0]",
            AttributeError,
            "'env.box' has no attribute 'geers' : expected one of its own, such as {}",
        ),
        ("env.envs[3].unwrapped", IndexError, "'env.envs' has no item 3 : expected an index below 1; it is a list"),
        ("env.envs['x']", KeyError, "'env.envs' has no item 'x' : expected an index below 1; it is a list"),
        ("few['lwo']", KeyError, "'few' has no item 'lwo' : expected one of low, high; it is a dict"),
        ("few[5]", KeyError, "'few' has no item 5 : expected one of low, high; it is a dict"),
        ("empty['x']", KeyError, "'empty' has no item 'x' : expected one of none; it is a dict"),
        ("env.box[0]", IndexError, "'env.box' has no item 0 : expected what it takes ('Gearbox' object is not {}"),
        (
            "env.box.weights[2]",
            IndexError,
            "'env.box.weights' has no item 2 : expected what it takes (index 2 is out {}",
        ),
        ("env.box.weights[0][0][0]", IndexError, "'env.box.weights[0][0]' has no item 0 : expected what it takes {}"),
    ],
    ids=lambda value: value if isinstance(value, str) and " : " not in value else "",
)
def test_resolve_names_how_far_a_path_got_and_what_is_there(path, error, message, root):
    with pytest.raises(error) as caught:
        resolve(root, path)
    (text,) = caught.value.args
    assert text.startswith(message[:-2]) if message.endswith("{}") else text == message


def test_resolve_offers_the_most_similar_public_names_first(root):
    with pytest.raises(AttributeError, match=r"such as gears, weights, [\w, ]+; it is a Gearbox$") as caught:
        resolve(root, "env.box.geers")
    assert "hidden" not in str(caught.value)


def test_resolve_shows_no_more_than_ten_names():
    many = {f"key{i}": i for i in range(100)}
    with pytest.raises(KeyError) as caught:
        resolve({"many": many}, "many['key']")
    assert caught.value.args[0].count("key") == 1 + 10


def test_resolve_leaves_a_propertys_own_error_as_it_is(root):
    with pytest.raises(AttributeError, match=r"^'Gearbox' object has no attribute 'level'$"):
        resolve(root, "env.box.oil")
    with pytest.raises(RuntimeError, match=r"^the gearbox is stuck$"):
        resolve(root, "env.box.stuck")


def test_call_calls_what_can_be_called(root):
    assert call(root, "env.box.shift", (2,), {"by": 3}) == 5
    assert call(root, "env.box.shift", [2]) == 3
    assert call(root, "env.box.by_name.copy") == root["env"].box.by_name


def test_call_returns_what_cannot_be_called(root):
    assert call(root, "env.box.gears") is root["env"].box.gears
    assert call(root, "env.box.gears", (), {}) is root["env"].box.gears


@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {"by": 1})])
def test_call_refuses_arguments_for_what_cannot_be_called(args, kwargs, root):
    with pytest.raises(TypeError, match=r"'env.box.gears' takes no arguments : expected .* called, got a list$"):
        call(root, "env.box.gears", args, kwargs)


def test_call_lets_the_callees_own_error_through(root):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'gear'"):
        call(root, "env.box.shift")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"), [("gears", "gears"), ("gears[0].x", "gears"), ("_box['a.b']", "_box"), ("größe.x", "größe")]
)
def test_first_name_is_what_a_path_begins_with(path, name):
    assert first_name(path) == name


@pytest.mark.parametrize("path", ["", "[0]", ".gears", "gears..x", "__class__", "gears.__class__", "gears x"])
def test_first_name_of_what_is_no_path_is_refused(path):
    with pytest.raises(ValueError, match=r"^path '.*' is (malformed|refused)"):
        first_name(path)


def test_nearest_shows_public_names_the_most_similar_first():
    assert nearest("gaers", ["oil", "gears", "_gears", "by_name"]).startswith("gears, ")
    assert nearest("gears", ["_gears"]) == "none"
    assert len(nearest("gear", [f"gear{number}" for number in range(99)]).split(", ")) == 10
