"""Supervisor process of the local stack; `reflux up` starts it and `reflux down` ends it."""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path

from reflux_devstack.processes import StackError
from reflux_devstack.stack import running_stack
from reflux_kit import logs

_PR_SET_PDEATHSIG = 1


async def _run(state_dir: Path, fixed_http: dict[str, int], redis_url: str) -> None:
    serving = asyncio.create_task(_serve(state_dir, fixed_http, redis_url))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve(state_dir: Path, fixed_http: dict[str, int], redis_url: str) -> None:
    async with running_stack(state_dir, fixed_http, redis_url) as stack:
        assert stack.watcher is not None
        await stack.watcher


def main() -> None:
    """Runs until SIGTERM or SIGINT; exit status 2 when a process cannot start, 3 when another stack owns the folder."""
    parser = argparse.ArgumentParser(description="Runs the whole of reflux as one process tree on loopback.")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--gateway-http-port", type=int, default=0, help="port of the OpenAI API (default: a free one)")
    parser.add_argument("--trainer-http-port", type=int, default=0, help="port of /v1/runs (default: a free one)")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    options = parser.parse_args()
    if options.die_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    logs.setup("devstack")
    options.state_dir.mkdir(parents=True, exist_ok=True)
    with (options.state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"reflux: another stack runs in {options.state_dir}; end it with `reflux down`", file=sys.stderr)
            sys.exit(3)
        os.set_inheritable(lock.fileno(), False)
        fixed = {"inference-gateway": options.gateway_http_port, "trainer": options.trainer_http_port}
        try:
            chosen = {name: port for name, port in fixed.items() if port}
            asyncio.run(_run(options.state_dir, chosen, os.environ.get("REFLUX_REDIS_URL", "")))
        except* StackError as errors:
            print(f"reflux: {errors.exceptions[0]}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
