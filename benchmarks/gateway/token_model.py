"""How long a replica takes, step by step: prefill and decode cost, a limit of KV tokens, a counted prefix cache.

The model of one engine with continuous batching: a step prefills at most a chunk of one waiting prompt and decodes one
token of every running row, and takes the sum of both times. A prompt is computed once per replica while any of its
samples is there, or while the cache has room for it afterwards; samples of a prompt that is being computed share it. A
sample is let in, first come first served, when a row is free and its whole length fits: whether a real engine would
have preempted is nobody's advantage here. Pure but for the clock of the loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one replica; the defaults are a small model on one accelerator."""

    prefill_seconds_per_token: float = 50e-6
    step_seconds: float = 10e-3
    row_seconds: float = 0.1e-3
    max_rows: int = 64
    kv_tokens: int = 131_072
    chunk_tokens: int = 1024
    time_scale: float = 1.0
    """Everything takes this many times as long."""


@dataclass(eq=False)
class Row:
    """One sample on its way."""

    prompt: Hashable
    num_prompt_tokens: int
    num_tokens: int
    finished: asyncio.Future[None]
    generated: int = 0


@dataclass
class _Prompt:
    num_tokens: int
    computed: int = 0
    users: int = 0


@dataclass
class Replica:
    """Owns the rows, the queue and the cache of one replica; `run` is its engine."""

    costs: Costs
    busy_seconds: float = 0.0
    prefilled_tokens: int = 0
    _waiting: deque[Row] = field(default_factory=deque)
    _running: list[Row] = field(default_factory=list)
    _prompts: OrderedDict[Hashable, _Prompt] = field(default_factory=OrderedDict)
    _reserved: int = 0
    _work: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def load(self) -> int:
        """Samples that run or wait."""
        return len(self._running) + len(self._waiting)

    async def generate(self, prompt: Hashable, num_prompt_tokens: int, num_tokens: int) -> None:
        """Returns when the sample has its last token."""
        row = Row(prompt, num_prompt_tokens, num_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(row)
        self._work.set()
        try:
            await row.finished
        except asyncio.CancelledError:
            self._drop(row)
            raise

    def reset(self) -> None:
        """Empties the cache and the counters; only while nothing runs."""
        assert not self._running
        assert not self._waiting
        self._prompts.clear()
        self.busy_seconds, self.prefilled_tokens, self._reserved = 0.0, 0, 0

    async def run(self) -> None:
        """Steps for ever. Each begins when the one before should have ended, so that late wake-ups do not add up."""
        loop, end = asyncio.get_running_loop(), 0.0
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                end = loop.time()
            self._admit()
            seconds = self._begin_step()
            end += seconds
            self.busy_seconds += seconds
            await asyncio.sleep(end - loop.time())
            self._end_step()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.costs.max_rows:
            row = self._waiting[0]
            known = self._prompts.get(row.prompt)
            needed = row.num_tokens + (0 if known else row.num_prompt_tokens)
            if not self._make_room(needed, row.prompt) and self._running:
                return
            self._waiting.popleft()
            prompt = self._prompts.setdefault(row.prompt, _Prompt(row.num_prompt_tokens))
            self._prompts.move_to_end(row.prompt)
            prompt.users += 1
            self._reserved += needed
            self._running.append(row)

    def _make_room(self, needed: int, keep: Hashable) -> bool:
        """Forgets prompts that nobody uses, least recently used first, until the tokens fit."""
        for key in [key for key, prompt in self._prompts.items() if prompt.users == 0 and key != keep]:
            if self._reserved + needed <= self.costs.kv_tokens:
                break
            self._reserved -= self._prompts.pop(key).num_tokens
        return self._reserved + needed <= self.costs.kv_tokens

    def _begin_step(self) -> float:
        """Computes a chunk of the oldest prompt that is not there yet; the step's seconds."""
        missing = next((each for each in map(self._prompt, self._running) if each.computed < each.num_tokens), None)
        chunk = min(self.costs.chunk_tokens, missing.num_tokens - missing.computed) if missing else 0
        if missing:
            missing.computed += chunk
            self.prefilled_tokens += chunk
        rows = sum(prompt.computed == prompt.num_tokens for prompt in map(self._prompt, self._running))
        decode = self.costs.step_seconds + rows * self.costs.row_seconds if rows else 0.0
        return (decode + chunk * self.costs.prefill_seconds_per_token) * self.costs.time_scale

    def _end_step(self) -> None:
        for row in list(self._running):
            if self._prompt(row).computed == self._prompt(row).num_tokens:
                row.generated += 1
                if row.generated >= row.num_tokens:
                    self._drop(row)
                    row.finished.set_result(None)

    def _drop(self, row: Row) -> None:
        if row in self._running:
            self._running.remove(row)
            self._reserved -= row.num_tokens
            self._prompts[row.prompt].users -= 1
        elif row in self._waiting:
            self._waiting.remove(row)

    def _prompt(self, row: Row) -> _Prompt:
        return self._prompts[row.prompt]
