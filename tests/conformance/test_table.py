"""The table of `tests.conformance` names tests that are there, for every point."""

import ast
from pathlib import Path

import pytest

from tests.conformance import SHOWN

ROOT = Path(__file__).resolve().parents[2]


def test_every_point_is_in_the_table() -> None:
    assert list(SHOWN) == [f"C{number}" for number in range(1, 45)]
    assert {point for point, (_, tests) in SHOWN.items() if not tests} == set()


@pytest.mark.parametrize("point", SHOWN)
def test_named_tests_exist(point: str) -> None:
    for file, names in SHOWN[point][1].items():
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert [name for name in names if name not in there] == []
