"""What a pull has to move, and the moves between two ranks that hold equal layouts."""

from dataclasses import dataclass
from typing import Protocol

from reflux_transfer.layout import Layout


class Move(Protocol):
    """Runs of bytes from one source rank's tensors area to this rank's; `reflux_weightplan.Transfer` is one.

    Run i goes from `source_offset + i * source_pitch` to `target_offset + i * target_pitch`. Of a packed one the runs
    lie side by side at the source: offset and pitch say where they were gathered from.
    """

    @property
    def tensor(self) -> str: ...
    @property
    def source_rank(self) -> int: ...
    @property
    def source_offset(self) -> int: ...
    @property
    def target_offset(self) -> int: ...
    @property
    def run_bytes(self) -> int: ...
    @property
    def runs(self) -> int: ...
    @property
    def source_pitch(self) -> int: ...
    @property
    def target_pitch(self) -> int: ...
    @property
    def packed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A `Move` of one contiguous range."""

    tensor: str
    source_offset: int
    target_offset: int
    run_bytes: int
    source_rank: int = 0
    runs: int = 1
    source_pitch: int = 0
    target_pitch: int = 0
    packed: bool = False


def whole(source: Layout, target: Layout | None = None) -> tuple[WholeTensor, ...]:
    """Every tensor of `source` to its place in `target`, which has equal names and sizes; default: the same places."""
    places = (target or source).by_name
    return tuple(WholeTensor(s.name, s.offset, places[s.name].offset, s.nbytes) for s in source.slots)
