"""The driver process and calls to it, without a cluster."""

import subprocess
import sys

import pytest

from reflux_scheduler.backends.base import BackendAway
from reflux_scheduler.backends.ray import helper

FAILS = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    outcome, value = ("done", None) if message["method"] == "open" else ("failed", "Ray: KeyError: the group")
    print("a word on stderr", file=sys.stderr, flush=True)
    print(json.dumps({"number": message["number"], "outcome": outcome, "value": value}), flush=True)
"""
RACE = """
from reflux_scheduler.backends.ray.driver import cluster as driver
from reflux_scheduler.backends.ray.groups import GroupFacts, Manifest

def gone(name):
    raise ValueError(f"Failed to look up placement group with name: {name}")

manifest = Manifest("ab12-0", "ending", ())
driver.get_placement_group = gone
driver.Cluster.facts = lambda self: {manifest.group: GroupFacts("CREATED", "FINISHED")}
driver.Cluster.__new__(driver.Cluster).remove_group(manifest)
"""


async def test_what_failed_in_ray_is_said_in_the_drivers_words(tmp_path, monkeypatch):
    (tmp_path / "driver_that_fails.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(helper, "_DRIVER", "driver_that_fails")
    driver = helper.DriverProcess({}, open_seconds=60.0)
    try:
        with pytest.raises(BackendAway, match=r"^Ray: KeyError: the group$"):
            await driver.call("release", 60.0, grant_id="ab12-0")
    finally:
        await driver.close()


def test_a_group_that_somebody_else_has_just_removed_is_no_error():
    """In a process of its own: Ray is no good guest in this one."""
    subprocess.run([sys.executable, "-c", RACE], check=True, timeout=120)
