"""Issues prompts in the order of their indices, as far as the window allows, and builds the next ones ahead."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from reflux_kit.telemetry import span, traceparent
from reflux_tasks.task import Task
from reflux_trainer.backlog import Backlog
from reflux_trainer.codec import Codec
from reflux_trainer.problems import Question, question
from reflux_trainer.queue.groups import GroupQueue
from reflux_trainer.queue.records import Prompt
from reflux_trainer.window import Window


class Questions:
    """What prompts ask, by their index; `ahead` of them are built in a thread while nobody waits for them."""

    def __init__(self, task: Task[Any], codec: Codec, ahead: int, choose: Callable[[int], int]) -> None:
        """`choose` tells the number of the problem that a prompt asks."""
        self._task = task
        self._codec = codec
        self._ahead = ahead
        self._choose = choose
        self._built: dict[int, tuple[Question, list[int]]] = {}
        self._building: asyncio.Task[None] | None = None

    async def take(self, first: int, count: int) -> list[tuple[Question, list[int]]]:
        """Those of prompts `first` to `first + count`, with their prompt ids."""
        if self._building is not None:
            await self._building
        wanted = range(first, first + count)
        missing = [index for index in wanted if index not in self._built]
        if missing:
            await self._build(missing)
        taken = [self._built.pop(index) for index in wanted]
        following = [index for index in range(wanted.stop, wanted.stop + self._ahead) if index not in self._built]
        self._building = asyncio.create_task(self._build(following))
        return taken

    async def _build(self, indices: list[int]) -> None:
        self._built |= await asyncio.to_thread(lambda: {index: self._one(index) for index in indices})

    def _one(self, index: int) -> tuple[Question, list[int]]:
        built = question(self._task, "train", self._choose(index))
        return built, self._codec.prompt_ids(built)


class Issuer:
    """Owns the next prompt index. `fill` may be called by several tasks; one at a time issues."""

    def __init__(
        self, run: str, queue: GroupQueue, window: Window, backlog: Backlog, questions: Questions, next_index: int
    ) -> None:
        self._run = run
        self._queue = queue
        self._window = window
        self._backlog = backlog
        self._questions = questions
        self._lock = asyncio.Lock()
        self.next_index = next_index
        self.version = 0
        """Weight version that the fleet has committed; new prompts ask for at least this one."""

    async def fill(self) -> int:
        """Issues what the window allows; returns how many prompts that were."""
        async with self._lock:
            count = self._window.allowance()
            if not count:
                return 0
            questions = await self._questions.take(self.next_index, count)
            prompts = [self._prompt(self.next_index + place, *built) for place, built in enumerate(questions)]
            await self._queue.issue(prompts)
            self._backlog.issued(prompts)
            self.next_index += count
            self._window.issued(count)
            return count

    def _prompt(self, index: int, built: Question, token_ids: list[int]) -> Prompt:
        # The root span ends at once, so that a crash of the trainer cannot lose it; the children carry the durations.
        with span("prompt", reflux__run=self._run, reflux__prompt=index, reflux__version=self.version):
            parent = traceparent()
        return Prompt(
            index, token_ids, built.truth, self.version, time.time(), parent, problem=built.index, stratum=built.stratum
        )
