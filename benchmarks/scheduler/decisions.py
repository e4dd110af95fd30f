"""How many decisions a second does the policy make with 10,000 jobs pending?

The cluster of `place.py` (25,200 nodes), filled by churn to 85 %; 10,000 jobs of the same mix wait in 50 queues with
weights, guarantees and priorities. Cycles run until nothing starts any more; a decision is one job that was started or
told why it waits. Last line: one JSON object.
"""

import json
import sys
import time

import churn
import numpy as np

from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import decide
from reflux_placement.policy.view import Ask, Queue, Start, View
from reflux_placement.topology import Resources

JOBS, QUEUES = 10_000, 50
SHARE = np.array(churn.MIX_SHARE) / sum(churn.MIX_SHARE)


def asks(rng: np.random.Generator) -> list[Ask]:
    """Pending jobs of the churn's mix, priorities 0 to 3, a known duration for two of three."""
    return [
        Ask(
            job=f"job-{number}", number=number, gang=churn.gang_of(int(rng.choice(churn.MIX_NODES, p=SHARE))),
            submitted_at=float(number), queue=f"q{rng.integers(QUEUES)}", priority=int(rng.integers(4)),
            expected_seconds=float(rng.choice([0.0, 600.0, 7200.0])),
        )
        for number in range(JOBS)
    ]  # fmt: skip


def main() -> int:
    rng = np.random.default_rng(0)
    load = churn.Churn(churn.cluster(), 0.85)
    load.run_until(1000)
    room, live = load.room, churn.live_jobs(load.room)
    queues = {f"q{i}": Queue(name=f"q{i}", weight=1.0 + i % 5, guaranteed=Resources(1000)) for i in range(QUEUES)}
    pending, told, started_jobs, cycles = asks(rng), 0, 0, 0
    begun = time.perf_counter()
    while True:
        view = View(room=room.copy(), pending=pending, live=live, queues=queues, now=float(JOBS))
        decision = decide(view, PolicyConfig())
        starts = [action for action in decision.actions if isinstance(action, Start)]
        cycles, told, started_jobs = cycles + 1, told + len(starts) + len(decision.waits), started_jobs + len(starts)
        if not starts:
            break
        gone = {action.job for action in starts}
        by_job = {ask.job: ask for ask in pending}
        for action in starts:
            room.take(action.job, by_job[action.job].gang, action.assignment)
        pending = [ask for ask in pending if ask.job not in gone]
    seconds = time.perf_counter() - begun
    print(f"{cycles} cycles, {started_jobs} started, {len(pending)} left, {told} decisions in {seconds:.2f} s")
    print(json.dumps({"decisions_per_s": round(told / seconds, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
