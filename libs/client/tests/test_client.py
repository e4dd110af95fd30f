import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Metric, Progress, Run
from reflux_client import connection, runfile, seeds_table, tracing
from reflux_client.commands.demo import unfinished
from reflux_client.connection import ClientError
from reflux_client.progress import RunView, sparkline
from reflux_client.report.build import write_report
from reflux_client.runfile import load_changes
from reflux_runs.config import RlConfig, RunConfig
from reflux_runs.load import changed
from reflux_runs.translate import changes_of


def reflux(*arguments, cwd=None, **environment):
    env = {key: value for key, value in os.environ.items() if not key.startswith("REFLUX_")} | environment
    command = [sys.executable, "-m", "reflux_client.main", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture
def run_folder(tmp_path):
    """A run folder as the trainer leaves it, with two stages, two evaluations and one replayed step."""
    folder = tmp_path / "demo-1"
    folder.mkdir()
    figures = {"reward/mean": 0.4, "reward/pass_rate": 0.2, "time/train": 0.3, "outcomes/scored": 256}
    events = [{"stage": "rl", "step": s, "total_steps": 3, "at": 1e9 + s, "metrics": figures} for s in (1, 2, 2, 3)]
    ends = [(0, 0.5), (3, 0.65)]
    events += [
        {"stage": "evaluation", "step": s, "total_steps": 3, "at": 1e9, "metrics": {"eval/held/reward": r}}
        for s, r in ends
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"torn')
    sample = {
        "stage": "rl", "step": 1, "sample": "demo-1/3/0", "prompt": "Ti <ans>", "answer": "<script>", "truth": "Ti sg1",
        "reward": 1.0, "outcome": "scored", "peaks": {"two_theta": [20.0, 30.0], "intensity": [1.0, 0.5]},
    }  # fmt: skip
    (folder / "samples.jsonl").write_text((json.dumps(sample) + "\n") * 25)
    summary = {
        "state": "succeeded", "reward_after_warmup": 0.5, "reward_final": 0.65, "wall_seconds": 100, "steps": 3,
        "seed": 0,
        "peak_rss_bytes": 2**31, "lag_histogram": {"0": 10, "1": 5}, "versions": {"engine-0": [[1.0, 1], [2.0, 2]]},
        "evaluations": {"after_warmup": {"held": {"reward": 0.5}}, "final": {"held": {"reward": 0.65}}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_report_is_one_file_that_loads_nothing_from_elsewhere(run_folder):
    text = write_report(run_folder).read_text()
    assert "+0.150" in text
    assert text.count("<svg") == 5 + 10
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "src=" not in text
    assert "@import" not in text


def test_a_folder_without_a_summary_is_named(tmp_path):
    with pytest.raises(ClientError, match=r"summary\.json does not exist"):
        write_report(tmp_path)


@pytest.mark.parametrize("sample", ["", "run", "run/x", "run/1/2/3", "run/-1"])
def test_a_malformed_sample_id_says_how_to_write_one(sample):
    with pytest.raises(ClientError, match="<run>/<prompt>"):
        tracing.parse_sample_id(sample)


def test_the_trace_of_a_sample_ends_in_the_step_that_links_to_it(tmp_path):
    def span(name, span_id, parent="", trace="t1", links=(), prompt=3):
        attributes = {"reflux.run": "r", "reflux.prompt": prompt, "reflux.rewards": [0.25, 0.75]}
        line = {"service": "s", "name": name, "trace_id": trace, "span_id": span_id, "parent_id": parent}
        times = {"start_ns": 1, "end_ns": 2_000_001, "status": "UNSET"}
        return json.dumps(line | times | {"links": list(links), "attributes": attributes}) + "\n"

    lines = [span("prompt", "a"), span("generate", "b", "a"), span("train", "e", "a")]
    lines.append(span("optimizer step", "c", trace="t2", links=["t1"], prompt=-1))
    (tmp_path / "one.jsonl").write_text("".join(lines) + '{"torn')
    (tmp_path / "two.jsonl").write_text(span("prompt", "d", trace="t3", prompt=4))
    (root,) = tracing.find_tree(tmp_path, "r", 3)
    assert [child.record["name"] for child in root.children] == ["generate", "train"]
    assert [child.record["name"] for child in root.children[1].children] == ["optimizer step"]
    console = Console(record=True, width=160)
    console.print(tracing.render([root], "t", 1))
    text = console.export_text()
    assert "2.0 ms" in text
    assert "rewards=0.75" in text
    assert "0.25" not in text
    with pytest.raises(ClientError, match="no sample 2"):
        tracing.render([root], "t", 2)
    with pytest.raises(ClientError, match="no span of prompt 9"):
        tracing.find_tree(tmp_path, "r", 9)


def test_the_view_shows_reward_lag_and_evaluations():
    view = RunView("demo-1")
    figures = {"reward/mean": 0.25, "lag/mean": 1.0, "trainer_idle": 0.5, "sync_ms": 12.0}
    metrics = [Metric(name=name, value=value) for name, value in figures.items()]
    running = Run(state=Run.STATE_RUNNING)
    view.update(running, Progress(stage="rl", step=3, total_steps=9, metrics=metrics))
    view.update(running, Progress(stage="evaluation", step=3, metrics=[Metric(name="eval/held/reward", value=0.5)]))
    bounds = {"eval/held/reward": 0.6, "eval/held/reward_low": 0.55, "eval/held/reward_high": 0.65}
    bounded = [Metric(name=name, value=value) for name, value in bounds.items()]
    view.update(running, Progress(stage="evaluation", step=6, metrics=bounded))
    console = Console(record=True, width=120)
    console.print(view)
    text = console.export_text()
    assert all(
        part in text for part in ("3/9", "0.250", "50%", "12 ms", "step 3: 0.500", "step 6: 0.600 (0.550 .. 0.650)")
    )
    assert view.plain_line() == "running rl 3/9 reward=0.250 lag=1.000 idle=0.500 sync_ms=12.000"


def test_a_sparkline_spans_the_range():
    assert sparkline([0.0, 1.0])[0] != sparkline([0.0, 1.0])[1]
    assert len(sparkline([0.5] * 7)) == 7


def test_the_seeds_table_names_missed_bars(tmp_path):
    ends = {name: {"reward": 0.5} for name in ("one_phase", "two_phases")}
    row = {
        "reward_after_warmup": 0.50, "reward_final": 0.57, "wall_seconds": 1, "peak_rss_bytes": 1,
        "evaluations": {"after_warmup": ends, "final": ends},
    }  # fmt: skip
    rows = [("seed 0", row), ("control: peaks hidden, seed 0", row)]
    assert len(seeds_table.missed_bars(rows)) == 2
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- demo-seeds: begin -->\nold\n<!-- demo-seeds: end -->\nb\n")
    seeds_table.replace_in(readme, seeds_table.render(rows))
    assert "old" not in readme.read_text()
    assert readme.read_text().endswith("<!-- demo-seeds: end -->\nb\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[rl]\nstepz = 3\n", "rl.steps would work"),
        ('[rl]\nsteps = "many"\n', "rl.steps"),
        ("[rl]\nsamples_per_group = 1\n", "rl.samples_per_group = 1"),
        ("[rl]\nbatch_size = 100\n", "256 would work"),
        ("rl = 3\n", "section"),
        ("[rl", "TOML"),
        ('[model]\npath = "absent"\n', "there is no such folder"),
    ],
)
def test_a_bad_run_file_is_refused_before_anything_starts(tmp_path, text, says):
    path = tmp_path / "run.toml"
    path.write_text(text)
    done = reflux("run", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".reflux").exists()


def test_a_missing_run_file_and_a_missing_stack_are_one_line_each(tmp_path):
    for arguments in (("run", "absent.toml"), ("runs",), ("status",), ("watch", "x"), ("logs",)):
        done = reflux(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
    assert reflux("down", cwd=tmp_path).returncode == 0


def test_overrides_and_seed_reach_the_message(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[task]\nmixture_fraction = 0.1\n')
    message = runfile.load_run_file(path, 7, {"task": {"peaks_hidden": True}})
    assert (message.seed, message.task.peaks_hidden) == (7, True)
    assert message.task.mixture_fraction == pytest.approx(0.1)


def test_a_record_of_a_dead_stack_counts_as_none(tmp_path):
    (tmp_path / "stack.json").write_text(json.dumps({"pid": 2**22 - 1}))
    assert connection.read_record(tmp_path) is None


def test_changes_of_a_fork_come_from_a_part_of_a_run_file_and_from_settings(tmp_path):
    part = tmp_path / "part.toml"
    part.write_text("[rl]\nsteps = 200\nlearning_rate = 1e-4\n")
    changes = load_changes(part, ["rl.steps=300", "rl.staleness=pace", "name=child"])
    assert changed(RunConfig(), changes_of(changes)) == RunConfig(
        name="child", rl=RlConfig(steps=300, learning_rate=1e-4, staleness="pace")
    )


@pytest.mark.parametrize(
    ("setting", "says"), [("rl.steps", "KEY=VALUE"), ("rl.stepz=3", "rl.steps"), ("rl.steps=many", "rl.steps")]
)
def test_a_bad_change_is_refused_by_its_key(setting, says):
    with pytest.raises(ClientError, match=says):
        load_changes(None, [setting])


class Trainer:
    """One run in a state."""

    def __init__(self, *states):
        self.runs, self.resumed = [Run(name=f"runs/r{place}", state=state) for place, state in enumerate(states)], []

    async def ListRuns(self, request):
        return pb.ListRunsResponse(runs=self.runs[: request.page_size])

    async def ResumeRun(self, request):
        self.resumed.append(request.name)
        return pb.ResumeRunResponse(run=Run(name=request.name, state=Run.STATE_RUNNING))


@pytest.mark.parametrize(
    ("states", "taken_up", "resumed"),
    [
        ((), None, []),
        ((Run.STATE_SUCCEEDED, Run.STATE_FAILED), None, []),
        ((Run.STATE_RUNNING,), "runs/r0", []),
        ((Run.STATE_FAILED, Run.STATE_SUCCEEDED), "runs/r0", ["runs/r0"]),
        ((Run.STATE_CANCELLED,), "runs/r0", ["runs/r0"]),
    ],
)
async def test_a_demo_goes_on_with_its_newest_run_where_that_is_not_done(states, taken_up, resumed):
    trainer = Trainer(*states)
    found = await unfinished(trainer)
    assert (found.name if found else None) == taken_up
    assert trainer.resumed == resumed
