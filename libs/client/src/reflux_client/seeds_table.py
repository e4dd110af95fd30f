"""The README's table of the main job: three seeds and the control, with the bars they are held to."""

import os
import platform
import time
from pathlib import Path
from typing import Any

from reflux_client.connection import ClientError

_BEGIN, _END = "<!-- demo-seeds: begin -->", "<!-- demo-seeds: end -->"
MIN_FINAL, MIN_GAIN, MAX_CONTROL_GAIN = 0.58, 0.08, 0.04
Rows = list[tuple[str, dict[str, Any]]]


def render(rows: Rows) -> str:
    """Markdown table, with machine and date."""
    lines = [
        "| run | held-out reward after warm-up | after RL | gain | one phase | two phases | wall | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, summary in rows:
        before, after = summary["reward_after_warmup"], summary["reward_final"]
        cells = [label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        cells += [_both_ends(summary, name) for name in ("one_phase", "two_phases")]
        cells += [f"{summary['wall_seconds']:.0f} s", f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB"]
        lines.append("| " + " | ".join(cells) + " |")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"
    lines.append(f"\n`make demo-seeds`, {time.strftime('%Y-%m-%d')}, {machine}, CPU only.")
    return "\n".join(lines)


def missed_bars(rows: Rows) -> list[str]:
    """Bars that a row misses, as sentences."""
    missed = []
    for label, summary in rows:
        before, after = summary["reward_after_warmup"], summary["reward_final"]
        if label.startswith("control"):
            if after - before >= MAX_CONTROL_GAIN:
                missed.append(f"{label} gains {after - before:.3f}, allowed is less than {MAX_CONTROL_GAIN}")
        elif after < MIN_FINAL or after - before < MIN_GAIN:
            missed.append(f"{label} reaches {after:.3f} (+{after - before:.3f}), wanted {MIN_FINAL} and +{MIN_GAIN}")
    return missed


def replace_in(path: Path, table: str) -> None:
    """Puts the table between the markers of a Markdown file."""
    text = path.read_text()
    if _BEGIN not in text or _END not in text:
        raise ClientError(f"{path} has no markers {_BEGIN} and {_END}")
    head, _, rest = text.partition(_BEGIN)
    path.write_text(f"{head}{_BEGIN}\n{table}\n{_END}{rest.partition(_END)[2]}")


def _both_ends(summary: dict[str, Any], name: str) -> str:
    ends = summary["evaluations"]
    return f"{ends['after_warmup'][name]['reward']:.3f} -> {ends['final'][name]['reward']:.3f}"
