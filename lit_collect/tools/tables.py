"""Plain text for people: aligned columns, figures that can be read at a glance, and numbers that they give."""

import argparse
from collections.abc import Callable, Sequence


def table(rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Rows as lines with aligned columns.

    Args:
        rows: cells, as many in each row.
        indent: spaces before the first column.

    Example:
        >>> table([("key", "dtype"), ("observation", "float32")])
        ['  key          dtype', '  observation  float32']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [(" " * indent + line).rstrip() for line in lines]


def per_second(rate: float) -> str:
    """A rate with three significant digits.

    Example:
        >>> per_second(253_412.0), per_second(1234.5), per_second(0.1234)
        ('253,000', '1,230', '0.123')
    """
    if rate >= 100:
        digits = len(str(int(rate))) - 3
        return f"{round(rate, -digits):,.0f}"
    return f"{rate:.3g}"


def shape_text(sizes: Sequence[object]) -> str:
    """A shape as it is written in the documentation.

    Example:
        >>> shape_text(["N", "T", 4])
        '[N, T, 4]'
    """
    return f"[{', '.join(map(str, sizes))}]"


def whole(least: int) -> Callable[[str], int]:
    """The type of a command line option: whole numbers from `least` on."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    read.__name__ = "whole number"  # argparse names it where it is none
    return read
