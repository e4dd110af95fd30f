"""Picks the tier: the default that this machine can run, or the one asked for by name; and says why."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from reflux_kit.errors import StartupError
from reflux_sandbox.isolation.base import Isolation, IsolationUnavailable
from reflux_sandbox.isolation.bwrap import BwrapIsolation
from reflux_sandbox.isolation.gvisor import GvisorIsolation
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.isolation.process import ProcessIsolation
from reflux_tasks.verify import TierName

log = logging.getLogger(__name__)

TIERS: dict[TierName, type[PreforkIsolation | BwrapIsolation | GvisorIsolation | ProcessIsolation]] = {
    "prefork": PreforkIsolation,
    "bwrap": BwrapIsolation,
    "gvisor": GvisorIsolation,
    "process": ProcessIsolation,
}
_AUTO: tuple[TierName, ...] = ("prefork", "bwrap", "gvisor")
"""Fastest first; all of them hold model-written code. `process` is never chosen without its name."""


@asynccontextmanager
async def open_isolation(
    wanted: TierName | Literal["auto"], **options: Any
) -> AsyncIterator[tuple[Isolation, list[str]]]:
    """Yields the started mechanism and the reasons for it. `auto` takes the next tier where prefork is not possible.

    Raises StartupError when the mechanism that was asked for by name, or every one, cannot run here.
    """
    names: tuple[TierName, ...] = _AUTO if wanted == "auto" else (wanted,)
    missing: list[str] = []
    for name in names:
        isolation = TIERS[name](**options)
        try:
            await isolation.start()
        except IsolationUnavailable as error:
            missing.append(f"tier {name} is not possible here: {error}")
            continue
        reasons = [*missing, *isolation.reasons]
        level = logging.WARNING if missing or name == "process" else logging.INFO
        log.log(level, "isolation tier %s: %s", name, "; ".join(reasons))
        try:
            yield isolation, reasons
        finally:
            await isolation.close()
        return
    way_out = "; REFLUX_SANDBOX_ISOLATION=process runs trusted verifiers without isolation" if wanted == "auto" else ""
    raise StartupError("no isolation: " + "; ".join(missing) + way_out)
