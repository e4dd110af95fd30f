"""Owns the plan: which rank serves which bytes to which rank, in which buckets and order, for one pair of layouts.

A plan is a pure function of the two layouts and the options, and has one hash in every process. It never lists the
transfers of all ranks (82 million for a 671 B model on 256 and 512 ranks): an `Expander` makes one rank's.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from reflux_weightplan.buckets import Bucket, Bucketing, fill_buckets
from reflux_weightplan.classes import Joined, TensorClass, join
from reflux_weightplan.demand import Accumulator, Demand
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.links import DEFAULT_LINK, LinkModel, places_of, ports_of, tiers
from reflux_weightplan.peers import Peers, find_peers
from reflux_weightplan.relay import Network, RelayPlan, by_source, plan_relay, port_bound_of
from reflux_weightplan.schedule import Schedule, schedule
from reflux_weightplan.sides import Ints, Side
from reflux_weightplan.sources import Groups, choose, group_sources
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.templates import PIECE_BYTES
from reflux_weightplan.wire import digest, layout_hash

Route = Literal["direct", "relay"]

RELAY_GAIN = 1.15
"""Relaying has more stages and a longer way to fail: it is taken when the bound falls by more than this factor."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan may choose."""

    bucket_bytes: int = 256 << 20
    """Most bytes that a bucket brings to one target rank; more than one piece (4 MiB)."""
    pack_below: int = 256 << 10
    """Runs shorter than this are gathered at the source. 256 KiB take 5 us at 50 GB/s: a message adds a fifth."""
    max_runs: int = 16384
    """Boxes of more runs than this are gathered, however long the runs are (WS 5.3: descriptors have a cost)."""
    relay: Literal["auto", "direct", "relay"] = "auto"
    """Whether peers pass bytes on: by the lower bounds, never, or whenever there are peers."""
    link: LinkModel = DEFAULT_LINK
    """Rates and the cost of a message."""
    background: tuple[float, ...] = ()
    """Seconds of sending that each source rank owes already; empty for none."""
    lost: tuple[int, ...] = ()
    """Source ranks that cannot serve."""


DEFAULTS = PlanOptions()

_PLANNER = b"reflux-weight-plan/1"
"""Part of every plan's hash: to be counted up when equal layouts and options begin to be planned in another way."""


@dataclass(frozen=True)
class Plan:
    """`traffic` and `messages` are int64 [S, D] of the direct route, `schedule` orders it. `relay` is there when it is
    the chosen route."""

    hash: str
    source_hash: str
    target_hash: str
    options: PlanOptions
    source: Side
    target: Side
    joined: Joined
    groups: Groups
    bucketing: Bucketing
    choice: Ints
    traffic: Ints
    messages: Ints
    peers: Peers
    relay: RelayPlan | None
    schedule: Schedule | None

    @property
    def route(self) -> Route:
        """How the bytes go."""
        return "relay" if self.relay else "direct"

    @property
    def classes(self) -> tuple[TensorClass, ...]:
        """Tensors that move alike."""
        return self.joined.classes

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets in the order of the transfer."""
        return self.bucketing.buckets

    @property
    def makespan_seconds(self) -> float:
        """Seconds until the last target rank has all bytes, by the link model."""
        return (self.relay or self._schedule).makespan_seconds

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds of the busiest port on the chosen route, bytes only."""
        return (self.relay or self._schedule).lower_bound_seconds

    @property
    def efficiency(self) -> float:
        """Lower bound / makespan."""
        return self.lower_bound_seconds / self.makespan_seconds

    @property
    def _schedule(self) -> Schedule:
        assert self.schedule is not None
        return self.schedule

    @cached_property
    def label_T(self) -> Ints:
        """Slab and share of every target tensor on the relayed route, 0 on the direct one."""
        return self.relay.division.label_T if self.relay else np.zeros(len(self.joined.class_T), np.int64)


def plan_hash(source_hash: str, target_hash: str, options: PlanOptions = DEFAULTS) -> str:
    """Name of the plan of two layouts, known before it is made."""
    settings = json.dumps(asdict(options), sort_keys=True).encode()
    return digest(_PLANNER, source_hash.encode(), target_hash.encode(), settings)


def plan(source: SpecLayout, target: SpecLayout, options: PlanOptions = DEFAULTS) -> Plan:
    """Plans the transfer. Raises `LayoutRefused` for a bad layout or bad options, `PlanRefused` with the missing ranges
    when the source cannot fill the target."""
    _check_options(source, options)
    giving, taking = Side(source), Side(target)
    joined = join(giving, taking, options.pack_below, options.max_runs)
    groups = group_sources(joined.classes, giving, taking, frozenset(options.lost))
    peers = find_peers(taking)
    bucketing = fill_buckets(joined, taking, peers.distinct, options.bucket_bytes)
    sums = Accumulator(joined.classes, groups, bucketing, taking)
    network = make_network(source, target, options.link)
    chooser = _Chooser(groups, network, options.background)
    demand = sums.demand(np.zeros(len(joined.class_T), np.int64), np.ones((1, taking.ranks), bool))
    _check_bytes(demand, taking)
    choice = chooser(demand)
    traffic = by_source(demand.nbytes, choice, giving.ranks)
    messages = by_source(demand.messages, choice, giving.ranks)
    if _relays(options, traffic, peers, network):
        relay, direct = plan_relay(sums, joined, taking, peers, network, chooser), None
    else:
        relay, direct = None, schedule(traffic, messages, network.source_places, network.target_places, options.link)
    hashes = layout_hash(source), layout_hash(target)
    return Plan(
        plan_hash(*hashes, options), *hashes, options, giving, taking, joined, groups, bucketing, choice, traffic,
        messages, peers, relay, direct,
    )  # fmt: skip


@dataclass(frozen=True)
class _Chooser:
    """Chooses the sources of a demand, all else being fixed."""

    groups: Groups
    network: Network
    background: tuple[float, ...]

    def __call__(self, demand: Demand) -> Ints:
        network = self.network
        rates = np.minimum(network.sources.rates.min(), network.targets.rates[network.targets.port_R])
        seconds = demand.nbytes / rates + demand.messages * network.link.alpha_seconds
        background = np.array(self.background or (0.0,) * len(network.source_places))
        tier_SD = tiers(network.source_places, network.target_places)
        return choose(seconds, self.groups, tier_SD, network.sources, background)


def _relays(options: PlanOptions, traffic: Ints, peers: Peers, network: Network) -> bool:
    """Whether peers pass bytes on: as the options say, or when it takes a clear part off the busiest port."""
    if peers.shares == 1 or options.relay == "direct":
        return False
    sizes = np.array([len(members) for members in peers.members])[peers.group_D]
    once = port_bound_of(traffic / sizes, traffic, network)
    return options.relay == "relay" or once * RELAY_GAIN < port_bound_of(traffic, traffic, network)


def make_network(source: SpecLayout, target: SpecLayout, link: LinkModel) -> Network:
    """Places and ports of two layouts."""
    source_places = places_of(source.places, source.mesh.ranks, "source")
    target_places = places_of(target.places, target.mesh.ranks, "target")
    return Network(source_places, target_places, link, ports_of(source_places, link), ports_of(target_places, link))


def _check_options(source: SpecLayout, options: PlanOptions) -> None:
    ranks = source.mesh.ranks
    if options.bucket_bytes <= PIECE_BYTES:
        raise LayoutRefused(f"a bucket holds more than a piece of {PIECE_BYTES} bytes, not {options.bucket_bytes}")
    if options.background and len(options.background) != ranks:
        raise LayoutRefused(f"background has {len(options.background)} ranks, the source has {ranks}")
    if any(not 0 <= rank < ranks for rank in options.lost):
        raise LayoutRefused(f"lost ranks {options.lost} are not all among the {ranks} of the source")


def _check_bytes(demand: Demand, target: Side) -> None:
    """Every target rank receives exactly the bytes that it holds."""
    wanted_D = np.bincount(target.kind_T, minlength=len(target.bytes_KR)) @ target.bytes_KR
    assert (demand.nbytes.sum(axis=0) == wanted_D).all(), "pieces do not add up to the target's boxes"
