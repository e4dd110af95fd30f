"""The engine's step: refresh a chunk of stale rows, or admit and prefill; decode one token for every fresh row.

Pure computation of one thread: `loop.py` owns the thread and the hand-over to asyncio.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from reflux_inference_gateway.engine.batcher import Admission, Batcher, Ticket
from reflux_inference_gateway.engine.refresh import Pace, PauseMeter, SwapFigures, fresh_rows
from reflux_inference_gateway.engine.refresher import Refresher
from reflux_inference_gateway.engine.rows import Drawn, RowIndex, Rows
from reflux_inference_gateway.engine.sequences import Sequence, start_sequence
from reflux_inference_gateway.engine.served import CoreOptions, Scored, Weights
from reflux_inference_gateway.engine.stops import Decode
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, TokenDelta
from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import Prefilled, decode_step, prefill
from reflux_model.training import logprobs

Event = FinishedSample | TokenDelta
Deliver = Callable[[str, Event], None]
Settled = Callable[[SwapFigures], None]


class EngineCore:
    """Owns the KV cache, the rows and the current weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        options: CoreOptions,
        deliver: Deliver,
        *,
        eos_ids: Iterable[int] = (),
        decode: Decode | None = None,
        settled: Settled = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the cache; `deliver` is called with (request id, event) in the thread that calls `step`.

        `settled` is called there with the figures of each swap, once all rows decode again.
        """
        self.options = options
        self.batcher = Batcher(options.max_rows, options.prefill_tokens_per_step)
        self.weights = weights
        self.prefilled_prompts = 0
        """Prompts computed so far, once per group and weight version."""
        self.generated_tokens = 0
        self.pause = PauseMeter(settled)
        self._clock = clock
        self._old: Weights | None = None
        self._config = config
        self._deliver = deliver
        self._eos_ids = tuple(eos_ids)
        self._decode = decode
        dtype = weights.params["model.embed_tokens.weight"].dtype
        self._cache = SlotCache(config, options.max_rows, options.max_model_len, dtype=dtype)
        self._rows = Rows(options.max_rows, options.max_model_len)
        self.refresher = Refresher(config, self._cache, self._rows, Pace(options.prefill_tokens_per_step), clock)
        self._sequences: list[Sequence] = []
        self._num_watched = 0
        self._requests: dict[str, GroupRequest] = {}
        self._outstanding: dict[str, int] = {}
        self._open_prompts: dict[str, Prefilled] = {}

    def submit(self, request: GroupRequest) -> None:
        """Queues a group; its id must not be in use."""
        sampling = request.sampling
        self.batcher.add(Ticket(request.request_id, request.num_samples, len(request.prompt_ids), sampling.max_tokens))
        self._requests[request.request_id] = request
        self._outstanding[request.request_id] = request.num_samples

    @torch.inference_mode()
    def abort(self, request_id: str) -> bool:
        """Ends a group's samples with what they have; False when there is no such group."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        rows, dropped = self.batcher.abort(request_id)
        for index in dropped:
            waiting = start_sequence(request, index, self.weights.version, self._decode)
            self._end(request_id, waiting.finish([], [], "abort"))
        if rows:
            self._finish(dict.fromkeys(rows, "abort"))
        return True

    def drop(self) -> None:
        """Ends everything that runs or waits."""
        for request_id in tuple(self._requests):
            self.abort(request_id)

    @torch.inference_mode()
    def score(self, token_ids: Seq[int]) -> Scored:
        """Log-probs as the learner computes them; needs two tokens at least, and no row."""
        (scores,) = logprobs(self.weights.params, self._config, [token_ids[:1]], [[token_ids[1:]]])
        return Scored(scores.tolist(), self.weights.version, self.weights.epoch)

    def swap(self, weights: Weights, *, overwritten: bool = False) -> None:
        """Makes new weights current, which takes no time: running sequences are stale from now on, and prefilled again
        chunk by chunk in the next steps, or go on with the old keys and values. Until the first of them is fresh the
        others go on under the old weights, unless those are `overwritten`; `settled` turns true when nobody does.
        """
        old, self.weights = self.weights, weights
        self._open_prompts.clear()
        if self.options.kv_after_swap == "keep":
            generated = self._rows.generated_B[: len(self._sequences)].tolist()
            for sequence, count in zip(self._sequences, generated, strict=True):
                sequence.spans.swap(count, weights.version, kept_kv=True)
        else:
            self.refresher.outdate(self._sequences)
            self._old = None if overwritten else old
        self.pause.swapped(self._clock())

    @property
    def settled(self) -> bool:
        """True when decoding goes on after the last swap and the old weights are no longer read."""
        return self.pause.resumed and self._old is None

    def pending_tokens(self) -> int:
        """Tokens that running and waiting samples may still cost."""
        return self.batcher.waiting_tokens + self._rows.remaining_tokens(len(self._sequences))

    @torch.inference_mode()
    def step(self) -> bool:
        """Refreshes a chunk, or admits what fits, and decodes a token for every fresh row; False when there was nothing
        to do. Nobody is admitted while rows are stale: a prompt would make them wait longer.
        """
        running = len(self._sequences)
        if not running:
            self._old = None
            self.pause.idle(self._clock())
        stale = self.refresher.stale(self._sequences)
        admissions = [] if stale else self.batcher.admit()
        if not admissions and not running:
            return False
        if stale:
            weights = self.weights
            count = self.refresher.advance(weights.params, weights.version, self._sequences, stale)
            self.pause.refreshed(count)
        ended = self._admit(admissions)
        rows = self._rows_to_decode(running)
        if rows:
            ended |= self._decode_rows(rows, stale=len(rows) < running, whole=not stale)
        if ended:
            self._finish(ended)
        return True

    def _rows_to_decode(self, running: int) -> range | list[int]:
        """The fresh rows; before there is one, those that can go on under the old weights."""
        fresh = fresh_rows([sequence.stale for sequence in self._sequences[:running]])
        if fresh or self._old is None:
            self._old = None
            return fresh
        return fresh_rows([not sequence.lingering for sequence in self._sequences[:running]])

    def _decode_rows(self, rows: range | list[int], *, stale: bool, whole: bool) -> dict[int, str]:
        index: RowIndex = slice(0, len(rows)) if isinstance(rows, range) else torch.tensor(rows)
        last_B, positions_B = self._rows.last_B[index], self._rows.positions_B[index]
        slots_B = None if isinstance(index, slice) else index
        start = self._clock()
        params = (self._old or self.weights).params
        logits = decode_step(params, self._config, last_B, self._cache, positions_B, slots_B)
        drawn = self._rows.draw(logits, index)
        end = self._clock()
        self.pause.decoded(start, end, stale=stale)
        if whole:
            self.refresher.pace.decoded(end - start)
        return self._accept(drawn, rows)

    def _admit(self, admissions: list[Admission]) -> dict[int, str]:
        """Prefills each group's prompt unless an earlier chunk of the group did, and seats the admitted samples."""
        if not admissions:
            return {}
        fresh = [one for one in admissions if one.ticket.request_id not in self._open_prompts]
        # Only the head of the queue can have an open prompt, so that its rows come before those of fresh groups.
        ended: dict[int, str] = {}
        for admission in admissions[: len(admissions) - len(fresh)]:
            ended |= self._seat([admission], self._open_prompts.pop(admission.ticket.request_id))
        prompts = [self._requests[one.ticket.request_id].prompt_ids for one in fresh]
        for first, last in self._chunks(prompts):
            ended |= self._seat(fresh[first:last], self._prefill(prompts[first:last]))
        return ended

    def _chunks(self, rows: Seq[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
        """Ranges of neighbours whose padded size stays within the budget of a step (one row may exceed it alone)."""
        first, longest = 0, 0
        for number, row in enumerate(rows):
            longest = max(longest, len(row))
            if number > first and longest * (number + 1 - first) > self.options.prefill_tokens_per_step:
                yield first, number
                first, longest = number, len(row)
        if rows:
            yield first, len(rows)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> Prefilled:
        self.prefilled_prompts += len(prompts)
        tokens_BL, lengths_B = _padded(prompts)
        return prefill(self.weights.params, self._config, tokens_BL, lengths_B)

    def _seat(self, admissions: list[Admission], prefilled: Prefilled) -> dict[int, str]:
        """Fans each prompt out to its rows and draws their first token; admissions are neighbours in row order."""
        sources = torch.cat([torch.full((one.count,), at) for at, one in enumerate(admissions)])
        first_row = admissions[0].row
        self._cache.insert(prefilled.kv, sources, torch.arange(first_row, first_row + len(sources)))
        for number, one in enumerate(admissions):
            if one.first + one.count < one.ticket.num_samples:
                rest = Prefilled(prefilled.logits_BV[number : number + 1], prefilled.kv.row(number))
                self._open_prompts[one.ticket.request_id] = rest
            self._start(one)
        seated = range(first_row, first_row + len(sources))
        drawn = self._rows.draw(prefilled.logits_BV[sources], slice(seated.start, seated.stop))
        return self._accept(drawn, seated)

    def _start(self, admission: Admission) -> None:
        request = self._requests[admission.ticket.request_id]
        sampling = request.sampling
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*self._eos_ids, *sampling.stop_token_ids)
        self._rows.seat(admission.row, admission.count, admission.first, len(request.prompt_ids), sampling, stop_ids)
        for offset in range(admission.count):
            sequence = start_sequence(request, admission.first + offset, self.weights.version, self._decode)
            self._num_watched += sequence.watched
            self._sequences.append(sequence)

    def _accept(self, drawn: Drawn, rows: Seq[int]) -> dict[int, str]:
        """Counts a step's tokens; returns the rows that ended, with their finish reason."""
        self.generated_tokens += len(rows)
        ended = dict.fromkeys(drawn.by_length, "length") | dict.fromkeys(drawn.by_stop, "stop")
        if self._num_watched:
            for offset, row in enumerate(rows):
                sequence = self._sequences[row]
                if sequence.watched and self._watch(sequence, drawn, offset):
                    ended[row] = "stop"
        return ended

    def _watch(self, sequence: Sequence, drawn: Drawn, offset: int) -> bool:
        """The slow path of one token: stop strings, top log-probs, streaming; True when a stop string ended it."""
        token = int(drawn.tokens.tokens_B[offset])
        top = drawn.top_of(offset, sequence.request.sampling.top_logprobs)
        if sequence.request.sampling.top_logprobs:
            sequence.top_logprobs.append(top)
        if sequence.request.stream_tokens:
            logprob = float(drawn.tokens.logprobs_B[offset])
            self._deliver(sequence.request.request_id, TokenDelta(sequence.index, token, logprob, top))
        return sequence.cursor is not None and sequence.cursor.push(token)

    def _finish(self, ended: dict[int, str]) -> None:
        """Delivers ended rows and closes the holes that they leave."""
        rows = sorted(ended)
        tokens, logprobs = self._rows.outputs(rows)
        for at, row in enumerate(rows):
            sequence = self._sequences[row]
            self._num_watched -= sequence.watched
            self._end(sequence.request.request_id, sequence.finish(tokens[at], logprobs[at], ended[row]))
        moves = self.batcher.release(rows)
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        if moves:
            self._move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._sequences[target] = self._sequences[source]
        del self._sequences[self.batcher.num_active :]

    def _end(self, request_id: str, sample: FinishedSample) -> None:
        self._deliver(request_id, sample)
        self._outstanding[request_id] -= 1
        if not self._outstanding[request_id]:
            del self._outstanding[request_id], self._requests[request_id]
            self._open_prompts.pop(request_id, None)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        span = int(self._rows.positions_B[sources].max()) + 1
        self._rows.move(sources, targets)
        for memory in (self._cache.keys, self._cache.values):
            memory[:, targets, :, :span] = memory[:, sources, :, :span]


def _padded(rows: list[tuple[int, ...]]) -> tuple[Tensor, Tensor | None]:
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.tensor(rows, dtype=torch.int64), None
    padded = [(*row, *([0] * (longest - len(row)))) for row in rows]
    return torch.tensor(padded, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
