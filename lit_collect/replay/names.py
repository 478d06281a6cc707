"""What the names of storages mean."""

from pathlib import Path

from lit_collect.replay.mapped import MappedStorage, SharedStorage
from lit_collect.replay.storage import MemoryStorage, Storage


def resolve_storage(storage: str | Storage, path: str | Path | None = None) -> Storage:
    """The storage that a setting means.

    Args:
        storage: "memory", "shared", "mapped" or a storage.
        path: the folder, for "mapped" alone.

    Raises:
        ValueError: for another name, a missing path or one that is not used.
        TypeError: for anything else.
    """
    if isinstance(storage, str) and storage == "mapped":
        if path is None or path == "":
            raise ValueError(f"storage='mapped' lacks its path : expected a folder, got {path!r}; give path=...")
        return MappedStorage(path)
    if path is not None:
        raise ValueError(
            f"path is not used : expected storage='mapped', got storage={storage!r} and path={str(path)!r}"
        )
    if isinstance(storage, Storage):
        return storage
    if not isinstance(storage, str):
        raise TypeError(f"storage has the wrong type : expected a name or a Storage, got {type(storage).__name__}")
    kinds = {"memory": MemoryStorage, "shared": SharedStorage}
    if storage not in kinds:
        raise ValueError(f"storage is unknown : expected 'memory', 'shared' or 'mapped', got {storage!r}")
    return kinds[storage]()


def check_path(name: str, storage: Storage | str, path: str | None) -> None:
    """Raise unless a folder is given for a mapped storage, and for no other.

    Args:
        name: of the setting of the folder, for messages.
        storage: as it was given.
        path: the folder or None.

    Raises:
        ValueError: then.
    """
    if (storage == "mapped") != (path is not None):
        raise ValueError(
            f"{name} is the folder of storage='mapped' : expected both or neither, got storage={storage!r} and "
            f"{name.rpartition('.')[2]}={path!r}"
        )
