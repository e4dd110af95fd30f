"""Refines many phase sets at once, each in a process of its own; leaving the pool ends what still runs."""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from reflux_tasks.verify import VerificationError
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.refinement import Candidate, Fit, RefinementOptions, refine, system_python


class Children:
    """The processes of a pool; once stopped, none is left and none starts."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._live: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a process; raises VerificationError after `stop`."""
        with self._lock:
            if self._stopped:
                raise VerificationError("the pool of refinements was stopped")
            process = subprocess.Popen(command, text=True, **options)
            self._live.add(process)
            return process

    def ended(self, process: subprocess.Popen[str]) -> None:
        """Forgets a process that was waited for."""
        with self._lock:
            self._live.discard(process)

    def stop(self) -> None:
        """Kills all."""
        with self._lock:
            self._stopped = True
            for process in self._live:
                process.kill()


class RefinementPool:
    """At most `workers` refinements at once (default: one per core). A context manager; Ctrl-C inside ends them all.

    Entering raises VerifierUnavailable without ObjCryst++.
    """

    def __init__(self, workers: int | None = None, python: Path | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1
        self._python = python
        self._children = Children()

    def __enter__(self) -> Self:
        self._python = self._python or system_python()
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="refine")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._children.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def refine_all(
        self, profile: Profile, sets: Iterable[Sequence[Candidate]], options: RefinementOptions
    ) -> Iterator[Fit | VerificationError]:
        """Fits in the order of the sets; a refinement that failed or spent its limit gives its error."""

        def run(candidates: Sequence[Candidate]) -> Fit | VerificationError:
            try:
                return refine(profile, candidates, options, self._python, self._children.start, self._children.ended)
            except VerificationError as error:
                return error

        return self._threads.map(run, sets)
