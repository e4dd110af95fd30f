"""What a pull reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PullReport:
    """What a pull moved, and how long it took with verification and waiting.

    `fingerprint` is that of the whole version: of the one source, or the tree over all sources in the order of ranks.
    `bytes` counts what was read from tensors, `slices` the checksums that were compared. `checksums` has those of all
    pieces when one source was read whole into the same places, so that the replica can serve them on unhashed.
    """

    bytes: int
    slices: int
    seconds: float
    fingerprint: int
    slice_bytes: int = 0
    checksums: tuple[int, ...] = ()
