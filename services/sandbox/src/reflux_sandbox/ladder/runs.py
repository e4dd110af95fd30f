"""What the ladders of one run have in common: its counters, its calibration, and forecasts from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_sandbox.ladder.calibration import Figures, Record, figures
from reflux_sandbox.ladder.store import WINDOW, LadderStore, RunRow
from reflux_sandbox.ladder.value import Forecaster

_MOST_RUNS = 64


@dataclass(frozen=True)
class RunState:
    """A run as far as it is known now."""

    row: RunRow
    window: Sequence[Record]
    figures: Figures
    forecaster: Forecaster


class Runs:
    """Reads runs; window and forecasts are kept until a record is added to them."""

    def __init__(self, store: LadderStore) -> None:
        self._store = store
        self._kept: dict[str, tuple[float, RunState]] = {}

    async def get(self, run: str) -> RunState:
        """The run; empty for one without ladders."""
        row = await self._store.run(run)
        records = row.counters.get("records", 0.0)
        kept = self._kept.get(run)
        if kept is not None and kept[0] == records:
            return RunState(row, kept[1].window, kept[1].figures, kept[1].forecaster)
        window = await self._store.window(run)
        state = RunState(row, window, figures(window), Forecaster(window))
        self._kept[run] = (records, state)
        while len(self._kept) > _MOST_RUNS:
            self._kept.pop(next(iter(self._kept)))
        return state

    async def with_records(self, run: str, records: Sequence[Record]) -> Figures:
        """Calibration as it is when `records` are added."""
        return figures([*(await self.get(run)).window, *records][-WINDOW:])
