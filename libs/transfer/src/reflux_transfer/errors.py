"""Every error that a transfer can end with, each also the fitting builtin."""


class TransferError(Exception):
    """Base of the errors of this library."""


class BackendUnavailable(TransferError, RuntimeError):
    """The mechanism cannot work on this machine; the text says why and what would help."""


class PathTooSlow(BackendUnavailable):
    """A path works and is slower than its floor. `rate` and `floor` are bytes per second, `hint` says what may help."""

    def __init__(self, path: str, rate: float, floor: float, hint: str) -> None:
        super().__init__(f"{path} moves {rate / 1e9:.3f} GB/s, its floor is {floor / 1e9:.3f} GB/s; {hint}")
        self.rate, self.floor, self.hint = rate, floor, hint


class PeerGone(TransferError, ConnectionError):
    """The process that owns the remote memory has exited, closed the region, or cannot be reached."""


class ReadDeadlineExceeded(TransferError, TimeoutError):
    """The read did not finish in time; the local range holds unknown bytes."""


class OutOfRange(TransferError, ValueError):
    """The range does not lie inside the region."""


class WrongHandle(TransferError, ValueError):
    """The bytes are no handle, belong to another backend or run, or name memory that is not what they describe."""


class UnshareableRegion(TransferError, ValueError):
    """The region can be read into but not described to others."""


class RegionBusy(TransferError, RuntimeError):
    """A read into the region is in flight."""


class RegionClosed(TransferError, RuntimeError):
    """The region was unregistered, or its backend closed."""


class ReadCancelled(TransferError, RuntimeError):
    """The caller gave the pull up, usually because a newer version is being prepared."""


class ChecksumMismatch(TransferError, ValueError):
    """The bytes that arrived are not those that were published."""

    def __init__(self, slice_name: str, offset: int, length: int, expected: int, actual: int) -> None:
        super().__init__(
            f"checksum mismatch in {slice_name} ({length} bytes at local offset {offset}): "
            f"xxh3 is {actual:016x}, published was {expected:016x}"
        )
        self.slice_name = slice_name


class LayoutError(TransferError, ValueError):
    """A layout is inconsistent, or tensors do not fit it; the text names the tensors."""


class ArenasBusy(TransferError, TimeoutError):
    """Both arenas are still readable by somebody; the text names the holders."""


class GenerationGone(TransferError, LookupError):
    """The arena no longer holds the generation: overwritten, withdrawn, or its staging failed; the text says which.

    The bytes that were read belong to nobody: take another source, or the next version.
    """


class PlanNotStaged(TransferError, LookupError):
    """The source staged the generation without this reader's plan: what the plan wants packed, it has not packed.

    A plan that packs nothing works with every source, by reading the pieces that cover the wanted bytes.
    """


class BaseMismatch(TransferError, ValueError):
    """A delta was made against weights that this process does not hold; the text names both fingerprints."""


class DeltaDamaged(TransferError, ValueError):
    """The bytes are no delta, are cut short, or do not decode into the weights that were published."""
