"""A task from `reflux tasks new` trains on a real stack, unchanged."""

import json
import os
import tomllib

import pytest
from e2e_stack import Harness

from reflux.trainer.v1.run_pb2 import Run
from reflux_client import stack
from reflux_client.commands.tasks_new import write_scaffold

pytestmark = pytest.mark.slow


@pytest.fixture
def with_task(tmp_path, monkeypatch):
    """A stack whose processes find the scaffolded task as they would after `pip install -e`; and the run file."""
    project, site, state = tmp_path / "my-alloys", tmp_path / "site", tmp_path / "state"
    write_scaffold("my-alloys", project)
    info = site / "my_alloys-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-alloys\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[reflux.tasks]\nmy-alloys = my_alloys.task:MyAlloysTask\n")
    folders = [str(site), str(project / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setenv("REFLUX_SANDBOX_IMPORT_FOLDERS", json.dumps(folders))
    monkeypatch.setenv("REFLUX_STATE_DIR", str(state))
    monkeypatch.setenv("REFLUX_TRAINER_RUNS_DIR", str(state / "runs"))
    state.mkdir()
    try:
        stack.start(state, die_with_parent=True)
        yield Harness(state), tomllib.loads((project / "run.toml").read_text())
    finally:
        stack.stop(state)


async def test_a_scaffolded_task_trains_for_two_steps(with_task):
    harness, document = with_task
    document["rl"]["steps"] = 2
    created = await harness.create(document)
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == 2
    assert summary["ledger"]["violations"] == []
