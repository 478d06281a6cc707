"""The places where frames can be collected, by name."""

from lit_collect.backends.base import Backend
from lit_collect.backends.direct import DirectBackend
from lit_collect.backends.process import ProcessBackend
from lit_collect.errors import BackendUnavailableError

_BY_NAME: dict[str, type[Backend]] = {"direct": DirectBackend, "process": ProcessBackend}
_PLANNED = ("ray", "rpc", "distributed", "submitit")


def resolve_backend(backend: Backend | str) -> Backend:
    """A backend by its object or plain name ("auto": the best one there is).

    Raises:
        BackendUnavailableError: if it is known but cannot be used here.
        ValueError: if there is none of that name.
        TypeError: if it is neither a name nor a backend.

    Example:
        >>> resolve_backend("direct")
        DirectBackend()
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name or a Backend object, got {backend!r}")
    if backend == "auto":
        return DirectBackend()
    if backend in _PLANNED:
        raise BackendUnavailableError(f"backend {backend!r} is not in this version; use {', '.join(_BY_NAME)}")
    if backend not in _BY_NAME:
        raise ValueError(f"backend must be one of auto, {', '.join(_BY_NAME)}, got {backend!r}")
    return _BY_NAME[backend]()


__all__ = ["Backend", "DirectBackend", "ProcessBackend", "resolve_backend"]
