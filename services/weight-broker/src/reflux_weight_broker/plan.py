"""What is published and who fits it: a layout's tensors, a publisher's offer, and which layouts go together. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import xxhash

from reflux_transfer.client.offer import Kind, SourceRegion
from reflux_weight_broker.refusals import LayoutMismatch

_NAMED = 5


@dataclass(frozen=True)
class Tensors:
    """A layout as far as the broker has to know it: `shapes` is name -> (global shape, dtype), in layout order."""

    hash: str
    ranks: int
    shapes: Mapping[str, tuple[tuple[int, ...], str]] = field(repr=False)

    @cached_property
    def signature(self) -> int:
        """Equal for layouts with the same names, shapes and dtypes, however they are cut and ordered."""
        return xxhash.xxh3_128_intdigest(repr(sorted(self.shapes.items())).encode())

    def differences(self, other: "Tensors") -> list[str]:
        """How `other` differs in names, shapes and dtypes; empty when one can be filled from the other."""
        if self.signature == other.signature:
            return []
        found = [f"missing {name}" for name in self.shapes if name not in other.shapes]
        found += [f"unexpected {name}" for name in other.shapes if name not in self.shapes]
        for name, (shape, dtype) in self.shapes.items():
            theirs = other.shapes.get(name)
            if theirs and theirs != (shape, dtype):
                found.append(f"{name} is {theirs[1]}{list(theirs[0])} instead of {dtype}{list(shape)}")
        return found


@dataclass(frozen=True)
class Manifest:
    """What a publisher offers. A delta starts from `base_epoch`, an adapter stands on top of it."""

    model_id: str
    version: int
    request_id: str
    tensors: Tensors
    regions: tuple[SourceRegion, ...]
    kind: Kind = "full"
    base_epoch: int = 0
    timeout_seconds: float = 60.0
    probe_token_ids: tuple[int, ...] = ()


def check_layouts(source: Tensors, destination: Tensors, replica: str) -> None:
    """Raises `LayoutMismatch` naming up to five tensors that differ in name, shape or dtype."""
    found = source.differences(destination)
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise LayoutMismatch(
            f"the layout of replica {replica} differs from the publisher's: {', '.join(found[:_NAMED])}{more}"
        )
