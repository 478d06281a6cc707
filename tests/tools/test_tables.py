"""Plain text for people."""

import pytest

from lit_collect.tools.tables import per_second, shape_text, table


def test_columns_are_aligned_and_lines_have_no_tail():
    assert table([("a", "bb", ""), ("ccc", "d", "e")]) == ["  a    bb", "  ccc  d   e"]


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.01234, "0.0123"), (9.876, "9.88"), (99.94, "99.9"), (100, "100"), (1234.5, "1,230"), (999_600, "1,000,000")],
)
def test_rates_have_three_digits(rate, text):
    assert per_second(rate) == text


def test_shape_of_a_number_is_empty():
    assert shape_text([]) == "[]"
