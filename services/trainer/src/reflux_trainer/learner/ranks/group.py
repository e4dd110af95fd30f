"""The processes of a sharded model's ranks 1 and up, and rank 0's way to tell them what all do together."""

import logging
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from reflux_trainer.learner.ranks.process import LANES, main
from reflux_trainer.learner.ranks.setup import RankLost, RankSetup
from reflux_trainer.learner.ranks.works import ShardWorks, joined

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_DEATH_SECONDS = 5.0
"""A collective breaks before the kernel has told that its peer is gone."""


class RankGroup:
    """Owns the processes. `works` is rank 0's part; only the torch thread calls `everywhere`."""

    def __init__(self, setup: RankSetup, on_loss: Callable[[str], None]) -> None:
        """Starts and joins all ranks. `on_loss` is called once, from a thread, when a process has ended unasked."""
        self._on_loss, self._closing = on_loss, threading.Event()
        self._ended, self._cause = threading.Event(), ""
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="reflux-ranks-"))
        rendezvous = str(Path(folder) / "store")
        spawn = multiprocessing.get_context("spawn")
        self._lanes: dict[str, list[Connection]] = {lane: [] for lane in LANES}
        self._turns = {lane: threading.Lock() for lane in LANES}
        self._processes = []
        for rank in range(1, setup.ranks):
            ends = {lane: spawn.Pipe() for lane in LANES}
            theirs = {lane: far for lane, (_, far) in ends.items()}
            process = spawn.Process(
                target=main, args=(rank, setup, rendezvous, theirs), name=f"learner-rank-{rank}", daemon=True
            )
            process.start()
            self._processes.append(process)
            for lane, (near, far) in ends.items():
                far.close()  # so that the lane closes with the process
                self._lanes[lane].append(cast(Connection, near))
        self._watch = threading.Thread(target=self._watched, name="learner-ranks", daemon=True)
        self._watch.start()
        self.works = ShardWorks(self._stack.enter_context(joined(0, setup.ranks, rendezvous, setup.timeout_seconds)))

    @property
    def pids(self) -> list[int]:
        """Processes of ranks 1 and up."""
        return [process.pid or 0 for process in self._processes]

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Runs a method of `ShardWorks` on every rank at the same time; results by rank. Raises `RankLost`."""
        with self._turns["torch"]:
            self._send("torch", method, [arguments] * len(self._processes))
            try:
                own = getattr(self.works, method)(*arguments)
            except RuntimeError as error:  # gloo's word for a peer that is gone
                raise RankLost(self._dead(_DEATH_SECONDS) or f"{method} failed on rank 0: {error}") from error
            return [own, *self._received("torch", method)]

    def others(self, lane: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Runs a method on ranks 1 and up, each with its own arguments. Raises `RankLost`."""
        with self._turns[lane]:
            self._send(lane, method, arguments)
            return self._received(lane, method)

    def close(self) -> None:
        """Ends the processes; the torch thread calls it."""
        self._closing.set()
        self._watch.join()
        for ends in self._lanes.values():
            for end in ends:
                end.close()
        for process in self._processes:
            process.join(_DEATH_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        try:
            self._stack.close()
        except RuntimeError as error:
            log.info("the process group was broken: %s", error)

    def _send(self, lane: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        try:
            for end, own in zip(self._lanes[lane], arguments, strict=True):
                end.send((method, own))
        except OSError as error:
            raise RankLost(self._dead(_DEATH_SECONDS) or f"{method}: {error}") from error

    def _received(self, lane: str, method: str) -> list[Any]:
        results = []
        for rank, end in enumerate(self._lanes[lane], 1):
            while not end.poll(_LOOK_SECONDS):
                if dead := self._dead(0.0):
                    raise RankLost(dead)
            try:
                good, result = end.recv()
            except (EOFError, OSError) as error:
                raise RankLost(self._dead(_DEATH_SECONDS) or f"rank {rank} closed its lane: {error}") from error
            if not good:
                raise RankLost(f"{method} failed on rank {rank}: {result}")
            results.append(result)
        return results

    def _dead(self, seconds: float) -> str:
        """What became of a process that ended, waiting for one that is about to."""
        self._ended.wait(seconds)
        return self._cause

    def _watched(self) -> None:
        """The one thread that asks for the status of an ended process: the kernel tells it once."""
        while not self._closing.is_set():
            ended = wait([process.sentinel for process in self._processes], _LOOK_SECONDS)
            for rank, process in enumerate(self._processes, 1):
                if process.sentinel in ended and not self._closing.is_set():
                    process.join(_DEATH_SECONDS)
                    self._cause = f"the process of rank {rank} (pid {process.pid}) ended with status {process.exitcode}"
                    self._ended.set()
                    log.error("%s", self._cause)
                    self._on_loss(self._cause)
                    return
