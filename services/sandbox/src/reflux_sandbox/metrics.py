"""Prometheus metrics of the sandbox; names are part of the contract with dashboards."""

from prometheus_client import Counter, Gauge, Histogram

from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.reader import JobReader

_FAST = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)

GRADES = Counter("reflux_sandbox_grades_total", "Grades by verifier and outcome", ["verifier", "outcome"])
JOBS = Counter("reflux_sandbox_jobs_total", "Jobs created, by how they will be answered", ["how"])
RELEASES = Counter("reflux_sandbox_attempts_failed_total", "Attempts that gave no result", ["cause"])
QUEUED = Gauge("reflux_sandbox_queue_jobs", "Jobs that wait", ["fidelity"])
ANSWERS = Gauge(
    "reflux_sandbox_answers",
    "Answers of ended jobs since the store was made: executed, or reused from an equal one",
    ["how"],
)
DEAD = Gauge("reflux_sandbox_dead_letters", "Jobs that nothing could grade")
SUSPICIOUS = Gauge("reflux_sandbox_suspicious_runs", "Recent runs whose timeouts go with the length of answers")
CHILDREN = Gauge("reflux_sandbox_children", "Children by state", ["state"])
TIER = Gauge("reflux_sandbox_isolation_tier", "1 for the tier in use", ["tier"])
DISPATCH = Histogram("reflux_sandbox_dispatch_seconds", "Claim of a job to its verdict", ["fidelity"], buckets=_FAST)
CODE = Counter("reflux_sandbox_code_runs_total", "RunCode calls by status", ["status"])
OPEN_SESSIONS = Gauge("reflux_sandbox_open_sessions", "Stateful sessions that live")
ENDED_SESSIONS = Counter("reflux_sandbox_ended_sessions_total", "Stateful sessions that ended", ["cause"])
SESSIONS = Counter("reflux_sandbox_sessions_total", "Children used for verification", ["fidelity"])
BATCHED = Counter(
    "reflux_sandbox_batched_jobs_total", "Jobs graded in a child that had graded another one", ["fidelity"]
)


def observe(isolation: Isolation) -> None:
    """Shows the tier and the children of `isolation`."""
    TIER.clear()
    TIER.labels(isolation.name).set(1)
    CHILDREN.labels("idle").set_function(lambda: isolation.idle_children)
    CHILDREN.labels("busy").set_function(lambda: isolation.busy_children)


async def observe_store(store: JobReader) -> None:
    """Shows what only Redis knows, the same for every service that shares it."""
    for queue, depth in (await store.depths()).items():
        QUEUED.labels(queue).set(depth)
    for how, count in (await store.reuse()).items():
        ANSWERS.labels(how).set(count)
    DEAD.set(await store.dead_letter_count())
    SUSPICIOUS.set(len(await store.suspicious_runs(8)))
