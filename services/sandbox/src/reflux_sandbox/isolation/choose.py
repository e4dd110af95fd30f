"""Picks the strongest tier that this machine can run, and says why."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from reflux_kit.errors import StartupError
from reflux_sandbox.isolation.base import Isolation, IsolationUnavailable, TierName
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.isolation.process import ProcessIsolation

log = logging.getLogger(__name__)

TIERS: dict[TierName, type[PreforkIsolation] | type[ProcessIsolation]] = {
    "prefork": PreforkIsolation,
    "process": ProcessIsolation,
}


@asynccontextmanager
async def open_isolation(wanted: str, **options: Any) -> AsyncIterator[tuple[Isolation, list[str]]]:
    """Yields the started mechanism and the reasons for it. `auto` falls back to a weaker one with a warning.

    Raises StartupError when the mechanism that was asked for by name, or every one, cannot run here.
    """
    names: list[TierName] = ["prefork", "process"] if wanted == "auto" else [wanted]  # type: ignore[list-item]
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
    raise StartupError("no isolation: " + "; ".join(missing))
