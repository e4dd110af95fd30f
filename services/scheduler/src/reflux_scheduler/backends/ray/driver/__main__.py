"""The process that talks to Ray; `helper.DriverProcess` starts it and calls it over stdin and stdout.

It keeps nothing of its own: groups and actors are detached and the records are in the cluster. Killed at any moment,
its successor goes on from what it finds.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from reflux_scheduler.backends.ray.driver.cluster import Cluster
from reflux_scheduler.backends.ray.driver.grants import AgentStart, Grants, Refused
from reflux_scheduler.backends.ray.driver.records import Records

log = logging.getLogger("reflux.ray")

_CALLS_AT_ONCE = 16
Calls = Mapping[str, Callable[..., Any]]


def join(options: Mapping[str, Any], argv: list[str], environment: Mapping[str, str]) -> Calls:
    """Joins the cluster and begins to carry its grants on; the calls that the scheduler may make, by name."""
    namespace = options["namespace"]
    ray.init(options["address"], namespace=namespace, log_to_driver=False, configure_logging=False)
    cluster = Cluster(namespace, options["domain_key"], options["node_name_key"])
    agent = AgentStart(argv, environment, options["start_seconds"], options["stop_grace_seconds"])
    grants = Grants(cluster, Records(namespace), agent)
    grants.supervise()
    return {
        "nodes": grants.nodes,
        "request": grants.request,
        "release": grants.release,
        "grants": grants.statuses,
    }


def answer(call: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """How a call came out: ("done", value), ("refused", why) or ("failed", why)."""
    try:
        return "done", call(**arguments)
    except Refused as error:
        return "refused", str(error)
    except Exception as error:  # process boundary: the scheduler gets every error, in one line
        log.exception("a call failed")
        return "failed", f"Ray: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


def main() -> None:
    """Serves calls until stdin ends; the first is "open" with the arguments of `join`."""
    # Stdout carries answers and nothing else: whatever Ray prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    writing = threading.Lock()

    def tell(number: int, outcome: str, value: Any) -> None:
        with writing:
            answers.write(json.dumps({"number": number, "outcome": outcome, "value": value}) + "\n")

    def serve(number: int, call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        tell(number, *answer(call, arguments))

    calls: Calls = {}
    pool = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="call")
    for line in sys.stdin:
        message = json.loads(line)
        if message["method"] == "open":
            outcome, value = answer(join, message["arguments"])
            calls = value if outcome == "done" else {}
            tell(message["number"], outcome, None if calls else value)
        else:
            pool.submit(serve, message["number"], calls[message["method"]], message["arguments"])
    # The scheduler is gone or wants another driver: what runs in the cluster stays as it is.
    os._exit(0)


if __name__ == "__main__":
    main()
