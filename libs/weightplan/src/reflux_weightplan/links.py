"""Owns the model of the network: a rate per port, a cost per message, and how near two ranks are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.mesh import Place
from reflux_weightplan.sides import Ints

SAME_HOST, SAME_DOMAIN, SAME_RACK, SPINE = range(4)
TIER_NAMES = ("same host", "NVLink domain", "rack", "spine")


@dataclass(frozen=True)
class LinkModel:
    """One port per NIC and direction, one message at a time; a message costs `alpha_seconds` beside its bytes.

    `bytes_per_second` is for places that do not give a rate of their own. Pairs on one host or in one NVLink domain use
    no port: each receiver takes their bytes at `local_bytes_per_second`.
    """

    bytes_per_second: float = 50e9
    alpha_seconds: float = 1e-6
    local_bytes_per_second: float = 300e9


DEFAULT_LINK = LinkModel()


@dataclass(frozen=True)
class Ports:
    """Ports of one side's ranks: `port_R` names the port of a rank, `rates` are bytes per second by port."""

    port_R: Ints
    rates: NDArray[np.float64]


def ports_of(places: Sequence[Place], link: LinkModel) -> Ports:
    """Ranks with one host and nic share a port at the slowest rate that one of them gives."""
    numbers: dict[tuple[str, str] | int, int] = {}
    keys = [(place.host, place.nic) if place.nic else rank for rank, place in enumerate(places)]
    port_R = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    rates = np.full(len(numbers), np.inf)
    np.minimum.at(rates, port_R, [place.bytes_per_second or link.bytes_per_second for place in places])
    return Ports(port_R, rates)


def tiers(sources: Sequence[Place], targets: Sequence[Place]) -> NDArray[np.int8]:
    """Nearness of every pair, int8 [S, D]: same host, NVLink domain, rack, or only the spine in common."""
    tier = np.full((len(sources), len(targets)), SPINE, np.int8)
    for level, label in ((SAME_RACK, "rack"), (SAME_DOMAIN, "domain"), (SAME_HOST, "host")):
        codes: dict[str, int] = {"": -1}
        left = np.array([codes.setdefault(getattr(place, label), len(codes)) for place in sources])
        right = np.array([codes.setdefault(getattr(place, label), len(codes)) for place in targets])
        tier[(left[:, None] == right[None, :]) & (left[:, None] >= 0)] = level
    return tier


def places_of(places: tuple[Place, ...], ranks: int, side: str) -> tuple[Place, ...]:
    """The places of a layout, or a host of its own for every rank."""
    return places or tuple(Place(f"{side}-{rank}", bytes_per_second=0.0) for rank in range(ranks))
