"""Interleaved rounds: every proxy has its turn in each round, in an order that rotates."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from proxies import Proxy

Measured = dict[str, dict[str, list[float]]]
"""Values of all rounds by whose they are and what they are."""


class Named(Protocol):
    """Whatever has its turn."""

    @property
    def name(self) -> str:
        """Unique among those that are compared."""
        ...


T = TypeVar("T", bound=Named)


def interleaved(ones: Sequence[T], rounds: int, turn: Callable[[T], Mapping[str, float]], warm_up: int = 1) -> Measured:
    """Figures of `rounds` turns of each, after rounds that do not count."""
    measured: Measured = {one.name: {} for one in ones}
    for number in range(rounds + warm_up):
        shift = number % len(ones)
        for one in (*ones[shift:], *ones[:shift]):
            figures = turn(one)
            for name, value in figures.items() if number >= warm_up else ():
                measured[one.name].setdefault(name, []).append(value)
    return measured


def with_cpu(proxy: Proxy, work: Callable[[], Mapping[str, float]], per: float) -> dict[str, float]:
    """What `work` returns, and the proxy's processor time of it in microseconds per one of `per`."""
    before = proxy.cpu_seconds()
    figures = work()
    return {**figures, "cpu_us": (proxy.cpu_seconds() - before) * 1e6 / per}


def middle(measured: Measured, proxy: str, name: str) -> float:
    """Median over the rounds."""
    return statistics.median(measured[proxy][name])


def show(measured: Measured, names: Mapping[str, str]) -> None:
    """Prints median, least and largest of the named figures, a line for each."""
    width = max(map(len, measured))
    for proxy, figures in measured.items():
        cells = []
        for name, unit in names.items():
            if values := figures.get(name):
                cells.append(f"{name} {statistics.median(values):.4g} [{min(values):.4g} {max(values):.4g}] {unit}")
        print(f"{proxy:{width}} {', '.join(cells)}", flush=True)


def versus(measured: Measured, key: str, name: str, peer: str = "vllm") -> dict[str, float]:
    """{key: ours / the peer's} of a figure, as medians; empty when the peer was left out or the run was too short."""
    theirs = middle(measured, peer, name) if peer in measured else 0.0
    return {key: round(middle(measured, "reflux", name) / theirs, 3)} if theirs else {}
