"""Text observations as arrays: code points, one integer for each character, padded with zeros.

Strings cannot be stacked, sent through shared memory or embedded by a network; their code points can.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_collect.errors import FrameContractError

CODE = np.dtype(np.int32)
"""Of one character."""


def encode_text(text: Any, length: int, name: str) -> np.ndarray:
    """The code points of a text.

    Args:
        text: what the env gave.
        length: the longest that its space allows.
        name: of the observation, for messages.

    Returns:
        [length] int32.

    Raises:
        FrameContractError: if it is no text, or too long.
    """
    if not isinstance(text, str) or len(text) > length:
        got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise FrameContractError(f"{name} is wrong : expected a text of up to {length} characters, got {got}")
    codes = np.zeros(length, CODE)
    codes[: len(text)] = [ord(character) for character in text]
    return codes


def decode_texts(codes: Tensor) -> list[Any] | str:
    """The texts of a batch, which `RolloutConfig.info_keys` names.

    Args:
        codes: [..., L] int32 code points, padded with zeros.

    Returns:
        Strings, in nested lists of the leading dimensions (one string if there are none).

    Raises:
        TypeError: if these are no code points.

    Example:
        >>> decode_texts(torch.tensor([[104, 105, 0], [0, 0, 0]], dtype=torch.int32))
        ['hi', '']
    """
    if not isinstance(codes, Tensor) or codes.ndim == 0 or codes.is_floating_point():
        got = f"{codes.dtype} with shape {tuple(codes.shape)}" if isinstance(codes, Tensor) else repr(codes)
        raise TypeError(f"codes cannot be read as texts : expected a tensor [..., L] of integers, got {got}")
    if codes.ndim > 1:
        return [decode_texts(row) for row in codes]
    return "".join(chr(code) for code in codes.to("cpu", torch.int64).tolist() if code)
