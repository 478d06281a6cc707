"""Whether the settings of a replay buffer are what they should be, and fit each other."""

from collections.abc import Sequence

from lit_collect.replay.samplers import Sampler
from lit_collect.replay.storage import MemoryStorage, Storage
from lit_collect.replay.transforms import SampleTransform
from lit_collect.replay.writers import Writer


def check_transforms(transforms: Sequence[SampleTransform]) -> tuple[SampleTransform, ...]:
    """Transforms as a tuple.

    Args:
        transforms: in the order in which they are applied.

    Raises:
        TypeError: if they are none.
        ValueError: if two of them cannot both be.
    """
    if not isinstance(transforms, Sequence):
        raise TypeError(f"transforms must be a sequence, got {transforms!r}; use a tuple")
    for transform in transforms:
        if not isinstance(transform, SampleTransform):
            raise TypeError(f"transforms must be of SampleTransform, got {transform!r}")
    final = [type(transform).__name__ for transform in transforms if transform.final]
    if len(final) > 1:
        raise ValueError(
            f"transforms must not undo each other : expected one that makes rewards and successors, got {final}"
        )
    return tuple(transforms)


def check_fit(
    sampler: Sampler, writer: Writer, storage: Storage, transforms: Sequence[SampleTransform], *, compact_obs: bool
) -> None:
    """Raise unless the parts of a buffer go together.

    Args:
        sampler: of the buffer.
        writer: of the buffer.
        storage: of the buffer.
        transforms: of its samples.
        compact_obs: whether successors are left out.

    Raises:
        ValueError: naming the two that do not.
    """
    if compact_obs and not isinstance(storage, MemoryStorage):
        raise ValueError(
            f"compact_obs keeps links between rows in this process : expected storage='memory', got "
            f"{type(storage).__name__}; store whole rows with compact_obs=False"
        )
    if not writer.in_order:
        name = type(writer).__name__
        if not isinstance(storage, MemoryStorage):
            raise ValueError(
                f"{name} chooses places in this process's memory : expected storage='memory', got "
                f"{type(storage).__name__}"
            )
        needy = [type(sampler).__name__] if sampler.needs_order else []
        needy += [type(transform).__name__ for transform in transforms if transform.needs_order]
        if needy or compact_obs:
            raise ValueError(
                f"{name} does not keep the rows that follow each other : expected writer='ring' for "
                f"{', '.join([*needy, *['compact_obs'] * compact_obs])}"
            )
    rowwise = [type(transform).__name__ for transform in transforms if not transform.takes_slices]
    if sampler.draws_slices and rowwise:
        raise ValueError(
            f"{', '.join(rowwise)} works on single rows : expected a sampler of rows, got {type(sampler).__name__}; "
            f"leave the slices or the transform out"
        )


def check_slices(sampler: Sampler, *, capacity: int, batch_size: int) -> None:
    """Raise if slices are longer than everything that is kept.

    Args:
        sampler: of the buffer.
        capacity: rows that are kept.
        batch_size: rows of a sample.

    Raises:
        ValueError: then.
    """
    shape = getattr(sampler, "shape", None)
    if shape is None or not getattr(sampler, "strict_length", True):
        return
    length = shape.of(batch_size)[1]
    if length > capacity:
        raise ValueError(f"replay.capacity must hold a slice of {length} rows, got {capacity}; raise it")
