"""A fleet in token time: how routing spreads work over replicas that prefill and decode at a stated cost."""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy

PREFILL_SECONDS_PER_TOKEN = 1e-4
STEP_SECONDS = 10e-3
STEP_SECONDS_PER_SEQUENCE = 0.1e-3
MAX_ROWS = 64
MAX_TOKENS = 2048


@dataclass
class Group:
    """One prompt and the lengths that its samples will have."""

    number: int
    prompt_tokens: int
    lengths: list[int]

    def ask(self) -> Ask:
        return Ask(
            num_samples=len(self.lengths),
            prompt=tuple(range(self.number << 16, (self.number << 16) + self.prompt_tokens)),
            num_prompt_tokens=self.prompt_tokens,
            max_tokens=MAX_TOKENS,
            run="run",
        )


@dataclass
class SimulatedReplica:
    """Prefills a share, which stops its decoding; decodes up to MAX_ROWS sequences a step, first come, first served."""

    order: int
    now: float = 0.0
    busy_seconds: float = 0.0
    prefilled_tokens: int = 0
    steps: int = 0
    inflight_tokens: int = 0
    dispatched: int = 0
    running: list[tuple[int, int, int]] = field(default_factory=list)
    """Heap of (step at which it ends, tie, share)."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)

    def candidate(self) -> Candidate:
        return Candidate(
            name=f"replicas/{self.order}",
            inflight_tokens=self.inflight_tokens,
            dispatched=self.dispatched,
            order=self.order,
            capacity=MAX_ROWS,
        )

    def take(self, share: int, prompt_tokens: int, lengths: list[int], now: float) -> None:
        self.now = max(self.now, now)
        self._spend(prompt_tokens * PREFILL_SECONDS_PER_TOKEN)
        self.prefilled_tokens += prompt_tokens
        self.waiting.extend((length, share) for length in lengths)
        self.left[share] = len(lengths)
        self._admit()

    def next_end(self) -> float:
        """When the next sample ends."""
        return self.now + (self.running[0][0] - self.steps) * self._step_seconds() if self.running else float("inf")

    def advance(self) -> list[int]:
        """Goes on to the next end; returns the shares that are complete then."""
        steps = self.running[0][0] - self.steps
        self._spend(steps * self._step_seconds())
        self.steps += steps
        complete = []
        while self.running and self.running[0][0] == self.steps:
            share = heapq.heappop(self.running)[2]
            self.inflight_tokens -= MAX_TOKENS
            self.left[share] -= 1
            complete += [share] if self.left[share] == 0 else []
        self._admit()
        return complete

    def _admit(self) -> None:
        while self.waiting and len(self.running) < MAX_ROWS:
            length, share = self.waiting.popleft()
            heapq.heappush(self.running, (self.steps + length, len(self.waiting), share))

    def _step_seconds(self) -> float:
        return STEP_SECONDS + STEP_SECONDS_PER_SEQUENCE * len(self.running)

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy_seconds += seconds


@dataclass(frozen=True)
class Outcome:
    """What the bars of the mix are about."""

    hot_spot: float
    """Largest busy time of a replica over the mean."""
    prefill_ratio: float
    """Tokens prefilled over the sum of the prompts' lengths."""
    makespan_seconds: float


def mix(seed: int) -> list[Group]:
    """64 groups of 8 and 4 of 64 in random order, 1k-token prompts; long-tailed lengths that depend on the prompt."""
    draw = random.Random(seed)
    sizes = [8] * 64 + [64] * 4
    draw.shuffle(sizes)
    groups = []
    for number, size in enumerate(sizes):
        hardness = draw.gauss(5.5, 0.4)
        lengths = [max(1, min(MAX_TOKENS, int(draw.lognormvariate(hardness, 0.8)))) for _ in range(size)]
        groups.append(Group(number, 1000, lengths))
    return groups


def simulate(policy: RoutingPolicy, groups: list[Group], concurrent: int, num_replicas: int = 4) -> Outcome:
    """Runs the groups in order, at most `concurrent` at once, and reports what the replicas did."""
    replicas = [SimulatedReplica(order) for order in range(num_replicas)]
    todo, now, num_shares = deque(groups), 0.0, 0
    shares: dict[int, tuple[SimulatedReplica, Group, list[int]]] = {}
    open_shares: dict[int, int] = {}
    while todo or shares:
        while todo and len(open_shares) < concurrent:
            group = todo.popleft()
            at = 0
            for share in policy.split([one.candidate() for one in replicas], group.ask()):
                replica = replicas[int(share.name.split("/")[1])]
                lengths = group.lengths[at : at + share.num_samples]
                at += share.num_samples
                replica.inflight_tokens += group.prompt_tokens + len(lengths) * MAX_TOKENS
                replica.dispatched += 1
                replica.take(num_shares, group.prompt_tokens, lengths, now)
                shares[num_shares] = (replica, group, lengths)
                open_shares[group.number] = open_shares.get(group.number, 0) + 1
                num_shares += 1
        replica = min(replicas, key=SimulatedReplica.next_end)
        now = max(now, replica.next_end())
        for number in replica.advance():
            owner, group, lengths = shares.pop(number)
            owner.inflight_tokens -= group.prompt_tokens
            policy.finished(owner.candidate().name, group.ask(), lengths)
            open_shares[group.number] -= 1
            if not open_shares[group.number]:
                del open_shares[group.number]
    busy = [one.busy_seconds for one in replicas]
    return Outcome(
        hot_spot=max(busy) / (sum(busy) / len(busy)),
        prefill_ratio=sum(one.prefilled_tokens for one in replicas) / sum(one.prompt_tokens for one in groups),
        makespan_seconds=max(one.now for one in replicas),
    )
