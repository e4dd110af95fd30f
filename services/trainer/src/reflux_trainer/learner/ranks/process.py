"""A rank's process: obeys what rank 0 sends down its lanes, and ends when they close.

A lane is a pipe with a thread of its own: "torch" for what computes, "publish" for the arenas of weights, "state" for
checkpoints that are written while training goes on. An order is (method, arguments); its answer (True, result) or
(False, text of the error).
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from reflux_trainer.learner.ranks.rank_publisher import RankPublisher
from reflux_trainer.learner.ranks.setup import RankSetup
from reflux_trainer.learner.ranks.works import ShardWorks, joined

LANES = ("torch", "publish", "state")


def main(rank: int, setup: RankSetup, rendezvous: str, lanes: Mapping[str, Connection]) -> None:
    """Target of the process. Signals to the group are rank 0's affair: the others end when their lanes close."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with joined(rank, setup.ranks, rendezvous, setup.timeout_seconds) as mesh:
        works = ShardWorks(mesh)
        publisher = RankPublisher(works, rank, setup)
        threads = [
            threading.Thread(target=asyncio.run, args=(_obey_async(lanes["publish"], publisher),), daemon=True),
            threading.Thread(target=_obey, args=(lanes["state"], works), daemon=True),
        ]
        for thread in threads:
            thread.start()
        _obey(lanes["torch"], works)


def _obey(lane: Connection, servant: object) -> None:
    while True:
        try:
            method, arguments = lane.recv()
        except EOFError:
            return
        lane.send(_answer(getattr(servant, method), arguments))


def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, method(*arguments)
    except Exception as error:  # The order's giver decides what it means.
        return False, f"{type(error).__name__}: {error}"


async def _obey_async(lane: Connection, servant: object) -> None:
    while True:
        try:
            method, arguments = await asyncio.to_thread(lane.recv)
        except EOFError:
            return
        try:
            answer = True, await getattr(servant, method)(*arguments)
        except Exception as error:  # As above.
            answer = False, f"{type(error).__name__}: {error}"
        lane.send(answer)
