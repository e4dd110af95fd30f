"""The live view of a run: stage, step, reward with a sparkline, lag, idle share, sync, queues, speed."""

from collections import deque
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reflux.trainer.v1.run_pb2 import Progress, Run

_BARS = "_.-~=+*#"
_SPARK_POINTS = 48
_STAGES = {"warmup": "warm-up", "rl": "reinforcement learning", "evaluation": "evaluation"}


class RunView:
    """Keeps the last figures of each stage and renders them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._run = Run()
        self._progress: Progress | None = None
        self._figures: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=_SPARK_POINTS)
        self._evaluations: list[tuple[int, str]] = []

    def update(self, run: Run, progress: Progress | None) -> None:
        """Takes one event."""
        self._run = run
        if progress is None:
            return
        figures = {metric.name: metric.value for metric in progress.metrics}
        if progress.stage == "evaluation":
            if "eval/held/reward" in figures:
                self._evaluations.append((progress.step, _with_interval(figures)))
            return
        self._progress = progress
        self._figures = figures
        if "reward/mean" in figures:
            self._rewards.append(figures["reward/mean"])

    def plain_line(self) -> str:
        """One line for logs and pipes."""
        at = f"{self._progress.stage} {self._progress.step}/{self._progress.total_steps}" if self._progress else ""
        wanted = {
            "reward/mean": "reward",
            "loss": "loss",
            "lag/mean": "lag",
            "trainer_idle": "idle",
            "sync_ms": "sync_ms",
        }
        figures = " ".join(f"{label}={self._figures[key]:.3f}" for key, label in wanted.items() if key in self._figures)
        return f"{self.state} {at} {figures}".strip()

    @property
    def state(self) -> str:
        """State in lower case, for example "running"."""
        return Run.State.Name(self._run.state).removeprefix("STATE_").lower().replace("_", " ")

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._progress is not None:
            parts.append(self._step_line(self._progress))
            parts.append(_table(self._cells()))
        if self._rewards:
            parts.append(Text(f"reward    {sparkline(self._rewards)}  {self._rewards[-1]:.3f}", style="cyan"))
        if self._evaluations:
            shown = "  ".join(f"step {step}: {reward}" for step, reward in self._evaluations[-5:])
            parts.append(Text(f"held-out  {shown}", style="green"))
        if self._run.message:
            parts.append(Text(self._run.message, style="yellow"))
        return Panel(
            Group(*parts or [Text("waiting for processes")]), title=f"{self._name} - {self.state}", title_align="left"
        )

    def _step_line(self, progress: Progress) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        stage = _STAGES.get(progress.stage, progress.stage)
        bar = ProgressBar(total=max(1, progress.total_steps), completed=progress.step, width=40)
        line.add_row(Text(stage, style="bold"), bar, f"{progress.step}/{progress.total_steps}")
        return line

    def _cells(self) -> list[tuple[str, str]]:
        return [
            ("loss", _shown(self._figures, "loss", "{:.3f}")),
            ("lag", _shown(self._figures, "lag/mean", "{:.2f}")),
            ("trainer idle", _shown(self._figures, "trainer_idle", "{:.0%}")),
            ("sync", _shown(self._figures, "sync_ms", "{:.0f} ms")),
            (
                "queue",
                _shown(self._figures, "queue/prompts", "{:.0f}")
                + " + "
                + _shown(self._figures, "queue/groups", "{:.0f}"),
            ),
            ("tokens/s", _shown(self._figures, "tokens_per_second", "{:,.0f}")),
            ("step", _shown(self._figures, "time/step", "{:.2f} s")),
        ]


def _with_interval(figures: Mapping[str, float]) -> str:
    """The held-out reward and its 95 % interval, which one prompt alone has not."""
    bounds = [figures[name] for name in ("eval/held/reward_low", "eval/held/reward_high") if name in figures]
    shown = f" ({' .. '.join(f'{bound:.3f}' for bound in bounds)})" if bounds else ""
    return f"{figures['eval/held/reward']:.3f}{shown}"


def sparkline(values: deque[float] | list[float]) -> str:
    """Values between their minimum and maximum as characters of growing weight."""
    low, high = min(values), max(values)
    width = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((value - low) / width * len(_BARS)))] for value in values)


def _table(cells: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row(*(Text(label, style="dim") for label, _ in cells))
    table.add_row(*(value for _, value in cells))
    return table


def _shown(figures: Mapping[str, float], name: str, form: str) -> str:
    return form.format(figures[name]) if name in figures else "-"
