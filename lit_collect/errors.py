"""The exceptions of lit_collect: one class for each kind of trouble, all under `LitCollectError`.

Wrong settings are not here: they are `ValueError` or `TypeError`, raised where the value is given.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class LitCollectError(Exception):
    """Base class of everything that can go wrong while frames are collected."""


class WorkerFailedError(LitCollectError):
    """An environment raised an exception while frames were collected.

    The message names the env copy, what it was doing, and the type and text of the original error, which is also
    the ``__cause__``. Mend the environment; the collector may be used again and then starts new episodes. (What a
    policy raises in this process is not wrapped: its own traceback says it best.)
    """


class WorkerDiedError(LitCollectError):
    """A collector process ended without saying why (killed, out of memory, crashed in native code)."""


class CollectTimeoutError(LitCollectError):
    """A collector did not answer within its deadline; the message names the option that changes the deadline."""


class CollectorClosedError(LitCollectError):
    """The collector was used after `shutdown()`. Build a new one."""


class BudgetSpentError(LitCollectError):
    """Frames were asked for although `total_frames` have been collected. Raise the budget or stop asking."""


class StaleDataError(LitCollectError):
    """Frames are older than the staleness that was allowed for them."""


class BackendUnavailableError(LitCollectError):
    """The chosen backend cannot run here; the message says what to install or which backends there are."""


class FrameContractError(LitCollectError):
    """Data break the contract of `lit_collect.frames`: a wrong shape, dtype, key or value of an env or a policy.

    The message names the env copy, the key, what was expected and what was got.
    """


def text_of(error: BaseException) -> str:
    """The message of an exception, however ill-behaved it is."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


@contextmanager
def second_to(first: BaseException | None) -> Iterator[None]:
    """Close something after an exception, which is the one to be seen: another one becomes a warning.

    Args:
        first: the exception; None if there was none, so that nothing is held back.
    """
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        if error is first.__cause__:  # it has been told
            return
        warnings.warn(f"closing the envs failed too: {text_of(error)}", stacklevel=3)
