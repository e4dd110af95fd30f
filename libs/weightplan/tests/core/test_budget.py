"""A plan of 45,000 tensors on 256 and 512 ranks keeps to its budget of memory and to its bounds of time on the wire."""

import json
import os
import subprocess
import sys
from pathlib import Path

PLANNED = """
import json, pathlib, re, sys
sys.path.insert(0, sys.argv[1])
from plan_worlds import bytes_of, deepseek_like
from reflux_weightplan.plan import PlanOptions, plan
from reflux_weightplan.expand import Expander
source, target = deepseek_like(replicas=4)
made = plan(source, target, PlanOptions(relay="direct"))
print(json.dumps({
    "tensors": len(made.joined.class_T), "parameters": source.nbytes / 2,
    "efficiency": made.efficiency, "bound": made.lower_bound_seconds,
    "rss_mib": int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024,
    "pairs": int((made.traffic > 0).sum()), "received": bytes_of(Expander(made).transfers(300).rows),
}))
"""


def test_the_512_rank_plan_fits_its_budget() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, str(Path(__file__).parent)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["tensors"] == 45_395
    assert abs(found["parameters"] - 671.0e9) < 0.1e9
    assert found["pairs"] == 256 * 512
    assert found["rss_mib"] <= 256
    assert found["efficiency"] >= 1 / 1.05
    assert 0.65 < found["bound"] < 0.67, "the sources' ports: 32.9 GB at 50 GB/s"
    assert 16.2e9 < found["received"] < 16.4e9
