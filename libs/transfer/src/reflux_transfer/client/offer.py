"""What a replica is offered and what it has made of it. Free of gRPC and protos: offers also go to engines' workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from reflux_transfer.arenas.packing import rank_layout
from reflux_transfer.handles import Scope, unseal
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.whole import Move, WholeTensor
from reflux_weightplan.expand import Expander
from reflux_weightplan.plan import PlanOptions, plan, plan_hash
from reflux_weightplan.sides import Side
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import layout_hash

Kind = Literal["full", "delta", "adapter"]

PACKED = PlanOptions(relay="direct")
"""How publishers plan for the layouts of the replicas that they know of, and those replicas for themselves."""

_PLAIN = PlanOptions(relay="direct", pack_below=0, max_runs=1 << 62)
"""Packs nothing, and so works with every source: covering pieces are read where only parts are wanted."""


@dataclass(frozen=True)
class SourceRegion:
    """A region that holds one rank of the source's layout while its header shows `generation`."""

    rank: int
    handle: bytes = field(repr=False)
    transport: str
    generation: int
    plans: tuple[str, ...] = ()
    """Hashes of the plans (with `PACKED`) of other layouts that it is staged for."""


class Route:
    """How one source layout's bytes reach the region of one rank of a target layout. Immutable, slow to make."""

    def __init__(self, source: SpecLayout, target: SpecLayout, rank: int, *, packed: bool = False) -> None:
        """`packed`: the source has packed pieces for the target, see `is_packed`.

        Raises `PlanRefused` or `LayoutRefused` where the layouts do not go together.
        """
        self.packed = packed
        self.plan_hash = ""
        """Of the plan that packed moves come from."""

        self.same = layout_hash(source) == layout_hash(target)
        """Whether the source's rank of the same number holds the same tensors at the same places."""

        self.source = source
        """The layout that is read from."""

        self.moves: Sequence[Move]
        if self.same:
            slots = layout_of_rank(target, rank).slots
            self.moves = tuple(WholeTensor(slot.name, slot.offset, slot.offset, slot.nbytes, rank) for slot in slots)
        else:
            planned = plan(source, target, PACKED if packed else _PLAIN)
            self.plan_hash = planned.hash if packed else ""
            self.moves = tuple(Expander(planned).transfers(rank))


@dataclass(frozen=True)
class Offer:
    """A version that can be pulled until `deadline`, a monotonic time `seconds` after it was offered."""

    version: int
    epoch: int
    kind: Kind
    regions: tuple[SourceRegion, ...]
    route: Route = field(repr=False)
    deadline: float
    seconds: float

    def check(self, scope: Scope) -> None:
        """Raises `WrongHandle` for a region that does not lie in `scope`, for those who hand the offer on."""
        for region in self.regions:
            unseal(region.handle, region.transport, scope=replace(scope, generation=region.generation))


@dataclass(frozen=True)
class Prepared:
    """An epoch that a receiver can commit. `fingerprint` is the whole version's, 0 when it is not known yet.

    `regions` are those of this rank that others may read from now on, until it takes the next version.
    """

    version: int
    epoch: int
    report: PullReport
    fingerprint: int
    regions: tuple[SourceRegion, ...] = ()


@dataclass(frozen=True)
class Update:
    """A version to be served from now on; it lies verified in `buffer`, the arena's buffer number `index`.

    With `fill` it does not lie there yet: the engine calls it in a thread while nothing reads the buffer, and serves
    nothing until a call has returned. When `fill` raises, the buffer holds a mixture of versions.
    """

    version: int
    epoch: int
    index: int
    buffer: memoryview
    fill: Callable[[], None] | None = None


def is_packed(regions: Sequence[SourceRegion], source_hash: str, target_hash: str) -> bool:
    """Whether all ranks of a source have what they pack for a reader of the target's layout."""
    wanted = plan_hash(source_hash, target_hash, PACKED)
    return all(wanted in region.plans for region in regions)


def layout_of_rank(layout: SpecLayout, rank: int) -> Layout:
    """Where the tensors of one rank lie in its region."""
    return rank_layout(Side(layout), rank)
