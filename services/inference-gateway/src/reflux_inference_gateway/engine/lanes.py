"""The models that one engine serves side by side, its own and adapters on it: each has weights and swaps of its own."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from reflux_inference_gateway.engine.refresh import PauseMeter
from reflux_inference_gateway.engine.served import Weights
from reflux_model.lora import RoutedLora, RoutedRows
from reflux_model.projections import PLAIN, Projections

OWN = ""
"""Name of the engine's own model."""
_SERIALS = itertools.count()


@dataclass(eq=False)
class Lane:
    """One served model. Its samples never see the keys and values of another lane, or of its own earlier weights."""

    name: str
    weights: Weights
    pause: PauseMeter
    old: Weights | None = None
    """Until a sample is fresh under the new weights, the others go on under these."""
    serial: int = field(default_factory=lambda: next(_SERIALS))
    """Another one after each swap; no other lane has ever had it."""

    @property
    def settled(self) -> bool:
        """True when decoding goes on after the last swap and the old weights are no longer read."""
        return self.pause.resumed and self.old is None

    @property
    def decoding(self) -> Weights:
        """Weights of the next decode step."""
        return self.old or self.weights

    def swap(self, weights: Weights, now: float, *, keep_old: bool) -> None:
        """Makes new weights current."""
        self.old = self.weights if keep_old else None
        self.weights, self.serial = weights, next(_SERIALS)
        self.pause.swapped(now)

    def idle(self, now: float) -> None:
        """No sample runs: nobody reads the old weights."""
        self.old = None
        self.pause.idle(now)

    def salt(self, own: str) -> str:
        """Names what may share computed prompts: samples of the same salt under these very weights."""
        return f"{self.serial}:{own}"


class Lanes:
    """Owns the lanes; that of the engine's own model is always there."""

    def __init__(self, weights: Weights, new_meter: Callable[[], PauseMeter]) -> None:
        self._new_meter = new_meter
        self._lanes = {OWN: Lane(OWN, weights, new_meter())}

    def __iter__(self) -> Iterator[Lane]:
        return iter(tuple(self._lanes.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._lanes

    @property
    def own(self) -> Lane:
        """That of the engine's own model."""
        return self._lanes[OWN]

    def of(self, name: str) -> Lane:
        """One that is there."""
        return self._lanes[name]

    def open(self, name: str, weights: Weights) -> None:
        """Serves an adapter from now on."""
        assert weights.adapter is not None
        self._lanes[name] = Lane(name, weights, self._new_meter())

    def close(self, name: str) -> None:
        """Forgets an adapter that no sample uses."""
        assert name != OWN
        self._lanes.pop(name, None)


def projections(rows: Sequence[Weights]) -> Projections:
    """The products of a pass over the engine's own matrices whose rows are of these weights."""
    by_adapter: dict[int, list[int]] = {}
    for row, weights in enumerate(rows):
        if weights.adapter is not None:
            by_adapter.setdefault(id(weights), []).append(row)
    parts = []
    for at in by_adapter.values():
        weights = rows[at[0]]
        assert weights.adapter is not None
        chosen = slice(None) if len(at) == len(rows) else torch.tensor(at)
        parts.append(RoutedRows(chosen, weights.params, weights.adapter))
    return RoutedLora(parts) if parts else PLAIN
