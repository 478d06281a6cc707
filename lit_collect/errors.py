"""The exceptions of lit_collect: one class for each kind of trouble, all under `LitCollectError`.

Wrong settings are not here: they are `ValueError` or `TypeError`, raised where the value is given.
"""


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
