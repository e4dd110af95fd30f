"""Works through a shared folder: `reflux-sandbox-worker --folder FOLDER`, or one task of a Slurm array.

It ends by SIGTERM, or after `--jobs` jobs; a task of an array does the one job that its index stands for.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

from reflux_kit.errors import StartupError
from reflux_sandbox.remote.mailbox import Mailbox
from reflux_sandbox.remote.node import open_node

log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_IDLE_SECONDS = 0.2


class Grades(Protocol):
    """Something that grades requests: a NodeGrader."""

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]: ...


async def work(mailbox: Mailbox, node: Grades, key: str = "", most_jobs: int = 0) -> int:
    """Does the job `key`, or jobs as they come, `most_jobs` of them (0: for ever). Returns how many were done."""
    done = 0
    while not most_jobs or done < most_jobs:
        taken = mailbox.take(key)
        if taken is not None:
            await _one(mailbox, node, *taken)
            done += 1
        elif key:
            log.info("job %s is done, taken or cancelled already", key)
            break
        else:
            await asyncio.sleep(_IDLE_SECONDS)
    return done


async def _one(mailbox: Mailbox, node: Grades, key: str, request: dict[str, Any]) -> None:
    """Grades and stores; stops when the job is cancelled."""
    grading = asyncio.create_task(node.grade(request))
    try:
        while not grading.done():
            await asyncio.wait([grading], timeout=_BEAT_SECONDS)
            mailbox.beat(key)
            if mailbox.is_cancelled(key):
                log.info("job %s is cancelled", key)
                mailbox.forget(key)
                return
        mailbox.finish(key, grading.result())
        log.info("job %s is done", key)
    except asyncio.CancelledError:
        mailbox.give_back(key)
        raise
    finally:
        grading.cancel()
        await asyncio.wait([grading])  # not its result: a cancellation of our own must not get lost here


def _array_key(path: Path) -> str:
    """The job of this task of a Slurm array."""
    return path.read_text().split()[int(os.environ["SLURM_ARRAY_TASK_ID"])]


async def _main(arguments: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    key = _array_key(Path(arguments.array)) if arguments.array else ""
    mailbox = Mailbox(Path(arguments.folder))
    with contextlib.suppress(asyncio.CancelledError):
        async with open_node(mailbox.read_node(), str(mailbox.folder / "cache")) as node:
            await work(mailbox, node, key, 1 if key else arguments.jobs)


def main() -> None:
    """Command line of a worker."""
    parser = argparse.ArgumentParser(prog="reflux-sandbox-worker", description=__doc__)
    parser.add_argument("--folder", required=True, help="the folder in the service's settings")
    parser.add_argument("--array", default="", help="file with one key per line; SLURM_ARRAY_TASK_ID picks it")
    parser.add_argument("--jobs", type=int, default=0, help="end after so many jobs")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(_main(parser.parse_args()))
    except (StartupError, OSError) as error:
        sys.exit(f"reflux-sandbox-worker: {error}")


if __name__ == "__main__":
    main()
