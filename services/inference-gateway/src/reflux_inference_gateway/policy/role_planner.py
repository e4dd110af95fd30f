"""How many of N replicas should compute prompts and how many decode. Pure: measured rates in, a proposal out.

Simulates one step of a run for each division: prompts are computed one after the other per prefill replica, in order of
arrival; a group is decoded where the fewest tokens lie, when its prompt is there. List scheduling (Graham 1969) bounds
what the order can cost; the simulation is exact for the rates that it is given.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one replica was measured to do: t(b) = `step_seconds` + b `step_seconds_per_sequence` for a decode step."""

    prefill_seconds_per_token: float
    step_seconds: float
    step_seconds_per_sequence: float
    capacity: int
    """Sequences that decode at once."""


@dataclass(frozen=True)
class Group:
    """One prompt and its samples."""

    prompt_tokens: int
    answer_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Division:
    """How replicas divide the work, and the time that the step is expected to take."""

    prefill: int
    decode: int
    """With `prefill` 0 these are replicas of role `both`."""
    makespan_seconds: float


def propose(groups: Sequence[Group], rates: Rates, num_replicas: int) -> list[Division]:
    """All divisions, the best first; of equal ones the one with fewer prefill replicas. Needs a replica."""
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    divisions = [
        Division(
            prefill=prefill,
            decode=num_replicas - prefill,
            makespan_seconds=makespan(groups, rates, prefill, num_replicas - prefill),
        )
        for prefill in range(num_replicas)
    ]
    return sorted(divisions, key=lambda one: (one.makespan_seconds, one.prefill))


def makespan(groups: Sequence[Group], rates: Rates, prefill: int, decode: int) -> float:
    """Seconds until the last sample of all groups is done, all of them asked for at once."""
    loads = [(0, number) for number in range(decode)]
    queues: list[list[tuple[float, int, tuple[int, ...]]]] = [[] for _ in range(decode)]
    free = [0.0] * prefill
    for group in groups:
        ready, here = 0.0, group.prompt_tokens
        if prefill:
            ready, here = heapq.heappop(free) + group.prompt_tokens * rates.prefill_seconds_per_token, 0
            heapq.heappush(free, ready)
        tokens, number = heapq.heappop(loads)
        heapq.heappush(loads, (tokens + sum(group.answer_tokens) + here, number))
        queues[number].append((ready, here, group.answer_tokens))
    return max((_decoded(queue, rates) for queue in queues), default=0.0)


def _decoded(queue: Sequence[tuple[float, int, tuple[int, ...]]], rates: Rates) -> float:
    """Seconds until one replica has decoded its groups: (when the prompt is there, tokens to compute here, lengths)."""
    waiting = [
        (ready, 0 if number else here, length)  # a group's first sample pays for its prompt
        for ready, here, lengths in sorted(queue)
        for number, length in enumerate(lengths)
    ]
    now, steps, at, running = 0.0, 0, 0, []
    while running or at < len(waiting):
        while at < len(waiting) and len(running) < rates.capacity and waiting[at][0] <= now:
            _, here, length = waiting[at]
            now += here * rates.prefill_seconds_per_token  # running rows wait for a prompt that is computed here
            heapq.heappush(running, steps + length)
            at += 1
        if not running:
            now = max(now, waiting[at][0])
            continue
        each = rates.step_seconds + len(running) * rates.step_seconds_per_sequence
        count = running[0] - steps
        if at < len(waiting) and len(running) < rates.capacity:  # until the next prompt comes, if that is earlier
            count = min(count, max(1, math.ceil((waiting[at][0] - now) / each)))
        now, steps = now + count * each, steps + count
        while running and running[0] <= steps:
            heapq.heappop(running)
    return now
