"""Which sequence sits in which row of the decode batch, and which groups wait. Pure: no torch, no clock, no threads.

Rows 0 .. num_active-1 are always occupied: a hole is filled with the last row, so that a decode step works on plain
slices of the KV cache and never gathers. A group waits as a whole and enters in chunks when rows are short.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """One group as the batcher sees it."""

    request_id: str
    num_samples: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Seat:
    """One sample of a group."""

    request_id: str
    sample_index: int
    tokens: int
    """Prompt and all that it may generate."""


@dataclass(frozen=True)
class Admission:
    """Samples `first .. first+count-1` of a group take rows `row .. row+count-1`."""

    ticket: Ticket
    first: int
    count: int
    row: int


@dataclass(frozen=True)
class Move:
    """The content of row `source` goes to row `target`."""

    source: int
    target: int


@dataclass
class _Waiting:
    ticket: Ticket
    next_sample: int = 0


@dataclass
class Batcher:
    """Owns the rows and the queue, first come first served.

    A group whose admission has begun stays at the head until its last sample has a row: its prompt's KV is held for
    it meanwhile, and one such prompt at a time bounds that memory.
    """

    max_rows: int
    prefill_tokens_per_step: int
    max_tokens: int
    """That the rows may have together; at least as many as one sample can have."""
    _rows: list[Seat] = field(default_factory=list)
    _queue: deque[_Waiting] = field(default_factory=deque)
    _waiting_samples: int = 0
    _waiting_tokens: int = 0
    _seated_tokens: int = 0

    @property
    def num_active(self) -> int:
        """Rows in use."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Samples without a row."""
        return self._waiting_samples

    def seat(self, row: int) -> Seat:
        """Who sits in a row."""
        return self._rows[row]

    @property
    def waiting_tokens(self) -> int:
        """Tokens that waiting samples may still cost; a prompt counts until its group's first sample is seated."""
        return self._waiting_tokens

    def add(self, ticket: Ticket) -> None:
        """Queues a group; the bound of the queue is kept by whoever accepts requests."""
        self._queue.append(_Waiting(ticket))
        self._waiting_samples += ticket.num_samples
        self._waiting_tokens += ticket.prompt_tokens + ticket.num_samples * ticket.max_tokens

    def admit(self) -> list[Admission]:
        """Seats waiting samples in free rows, as many as fit `max_tokens` with all that they may generate.

        Takes at least one sample when there is room, and no further group once the prompts of this step exceed
        `prefill_tokens_per_step`: running sequences wait for a prefill.
        """
        admissions: list[Admission] = []
        prompt_tokens = 0
        while self._queue and (room := self._room(self._queue[0].ticket)):
            head = self._queue[0]
            if admissions and prompt_tokens + head.ticket.prompt_tokens > self.prefill_tokens_per_step:
                break
            prompt_tokens += head.ticket.prompt_tokens
            admissions.append(self._seat_samples(head, room))
            if head.next_sample == head.ticket.num_samples:
                self._queue.popleft()
        return admissions

    def release(self, rows: Iterable[int]) -> list[Move]:
        """Frees rows and closes the holes. No row is both source and target, so that moves can be done at once."""
        freed = set(rows)
        self._seated_tokens -= sum(self._rows[row].tokens for row in freed)
        remaining = len(self._rows) - len(freed)
        holes = sorted(row for row in freed if row < remaining)
        survivors = [row for row in range(remaining, len(self._rows)) if row not in freed]
        for source, target in zip(survivors, holes, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[remaining:]
        return [Move(source, target) for source, target in zip(survivors, holes, strict=True)]

    def abort(self, request_id: str) -> tuple[list[int], list[int]]:
        """Drops a group's waiting samples; returns its rows (still to be released) and the dropped sample indices."""
        rows = [row for row, seat in enumerate(self._rows) if seat.request_id == request_id]
        dropped: list[int] = []
        for waiting in self._queue:
            if waiting.ticket.request_id == request_id:
                dropped = list(range(waiting.next_sample, waiting.ticket.num_samples))
                self._queue.remove(waiting)
                self._drop_waiting(waiting, len(dropped))
                break
        return rows, dropped

    def _room(self, ticket: Ticket) -> int:
        each = ticket.prompt_tokens + ticket.max_tokens
        return min(self.max_rows - len(self._rows), (self.max_tokens - self._seated_tokens) // each)

    def _seat_samples(self, head: _Waiting, room: int) -> Admission:
        count = min(room, head.ticket.num_samples - head.next_sample)
        admission = Admission(head.ticket, head.next_sample, count, len(self._rows))
        tokens = head.ticket.prompt_tokens + head.ticket.max_tokens
        self._rows += [Seat(head.ticket.request_id, head.next_sample + offset, tokens) for offset in range(count)]
        self._seated_tokens += count * tokens
        self._drop_waiting(head, count)
        head.next_sample += count
        return admission

    def _drop_waiting(self, waiting: _Waiting, count: int) -> None:
        ticket = waiting.ticket
        self._waiting_samples -= count
        self._waiting_tokens -= count * ticket.max_tokens + (ticket.prompt_tokens if waiting.next_sample == 0 else 0)
