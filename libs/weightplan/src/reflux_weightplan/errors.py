"""Every error of this library, each also the fitting builtin."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reflux_weightplan.boxes import Box

SHOWN = 8
"""Ranges that an error text lists; the attributes hold all of them."""


class WeightPlanError(Exception):
    """Base of the errors of this library."""


class LayoutRefused(WeightPlanError, ValueError):
    """A layout contradicts itself; the text names the tensor, the rank or the axis."""


class PlanRefused(WeightPlanError, ValueError):
    """The source cannot fill the target exactly. `missing` are (tensor, box) of the global tensor."""

    def __init__(self, what: str, *, missing: Sequence[tuple[str, "Box"]] = ()) -> None:
        super().__init__(f"{what}; missing {_listed(missing)}" if missing else what)
        self.missing = tuple(missing)


def _listed(ranges: Sequence[tuple[str, "Box"]]) -> str:
    shown = ", ".join(f"{name}{box}" for name, box in ranges[:SHOWN])
    return shown + (f" and {len(ranges) - SHOWN} more" if len(ranges) > SHOWN else "")
