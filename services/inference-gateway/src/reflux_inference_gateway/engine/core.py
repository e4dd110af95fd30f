"""The engine's step: fill a chunk of what rows lack (prompts; all after a swap), decode a token for every other row.

Pure computation of one thread: `loop.py` owns the thread and the hand-over to asyncio.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from reflux_inference_gateway.engine.batcher import Admission, Batcher, Ticket
from reflux_inference_gateway.engine.filler import Filler
from reflux_inference_gateway.engine.prefix_store import PrefixStore
from reflux_inference_gateway.engine.prompts import Leaders, Prompts
from reflux_inference_gateway.engine.refresh import PauseMeter, SwapFigures
from reflux_inference_gateway.engine.row_memory import RowMemory
from reflux_inference_gateway.engine.rows import Drawn, RowIndex, Rows
from reflux_inference_gateway.engine.sequences import Sequence, start_sequence
from reflux_inference_gateway.engine.served import CoreOptions, Scored, Weights
from reflux_inference_gateway.engine.stops import Decode
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, TokenDelta
from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import decode_step
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
        self.batcher = Batcher(options.max_rows, options.prefill_tokens_per_step, options.kv_tokens)
        self.weights = weights
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
        self._memory = RowMemory(self._cache, self.batcher)
        self._rows = Rows(options.max_rows, options.max_model_len)
        self.prompts = Prompts(self._cache, PrefixStore(config, options.prefix_blocks, dtype))
        self.filler = Filler(
            config, self._cache, self._rows, self.prompts, chunk_tokens=options.prefill_tokens_per_step, clock=clock
        )
        self._sequences: list[Sequence] = []
        self._num_watched = 0
        self._requests: dict[str, GroupRequest] = {}
        self._outstanding: dict[str, int] = {}

    def submit(self, request: GroupRequest) -> None:
        """Queues a group; its id must not be in use."""
        sampling = request.sampling
        self.batcher.add(Ticket(request.request_id, request.num_samples, len(request.prompt_ids), sampling.max_tokens))
        self._requests[request.request_id] = request
        self._outstanding[request.request_id] = request.num_samples
        self.prompts.adopt(request, self.weights.epoch)

    @torch.inference_mode()
    def abort(self, request_id: str) -> bool:
        """Ends a group's samples with what they have; False when there is no such group."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        rows, dropped = self.batcher.abort(request_id)
        for index in dropped:
            waiting = start_sequence(request, index, self.weights.version, 0, self._decode)
            self._end(request_id, waiting.finish([], [], "abort"))
        if rows:
            self._finish(dict.fromkeys(rows, "abort"))
            for sequence in self._sequences:
                if sequence.leader is not None and sequence.leader.request is request:
                    sequence.leader = None  # it computes by itself what it would have been given
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
        self.prompts.clear()
        keep, turn = self.options.kv_after_swap == "keep", self.filler.next_turn()
        generated = self._rows.generated_B[: len(self._sequences)].tolist()
        for sequence, count in zip(self._sequences, generated, strict=True):
            if keep and sequence.ready:
                sequence.spans.swap(count, weights.version, kept_kv=True)
            else:
                sequence.outdate(turn)
        if not keep:
            self._old = None if overwritten else old
        self.pause.swapped(self._clock())

    @property
    def settled(self) -> bool:
        """True when decoding goes on after the last swap and the old weights are no longer read."""
        return self.pause.resumed and self._old is None

    def pending_tokens(self) -> int:
        """Tokens that running and waiting samples may still cost."""
        unfilled = self.filler.pending_tokens(self._sequences)
        return self.batcher.waiting_tokens + unfilled + self._rows.remaining_tokens(len(self._sequences))

    @torch.inference_mode()
    def step(self) -> bool:
        """Fills a chunk and decodes a token for every row that can; False when there was nothing to do. Nobody is
        admitted while rows wait to be filled: another prompt would make them wait longer.
        """
        if not any(sequence.begun for sequence in self._sequences):
            self._old = None
            self.pause.idle(self._clock())
        if all(sequence.ready for sequence in self._sequences):
            self._admit(self.batcher.admit())
        if not self._sequences:
            return False
        if not all(sequence.ready for sequence in self._sequences):
            self.pause.refreshed(self.filler.advance(self.weights, self._sequences))
        rows = self._rows_to_decode()
        if rows:
            self._finish(self._decode_rows(rows))
        return True

    def _rows_to_decode(self) -> list[int]:
        """The rows that are ready; before there is one, those that can go on under the old weights."""
        ready = [row for row, sequence in enumerate(self._sequences) if sequence.ready]
        lingering = [row for row, sequence in enumerate(self._sequences) if sequence.lingering]
        if ready or self._old is None or not lingering:
            self._old = None
            return ready
        return lingering

    def _decode_rows(self, rows: list[int]) -> dict[int, str]:
        """Decodes a token for each of `rows`; returns the rows that ended, with their finish reason.

        Rows in between that must wait are computed, too, where they are few: what is written for them lies behind what
        they have, at the position that their own next step writes, and a gather would copy all keys and values.
        """
        span, start = rows[-1] + 1, self._clock()
        chosen: RowIndex = slice(0, span) if len(rows) == span else torch.tensor(rows)
        slots_B = chosen if isinstance(chosen, Tensor) and 2 * len(rows) < span else None
        computed: RowIndex = slice(0, span) if slots_B is None else slots_B
        last_B, positions_B = self._rows.last_B[computed], self._rows.positions_B[computed]
        params = (self._old or self.weights).params
        logits_BV = decode_step(params, self._config, last_B, self._cache, positions_B, slots_B)
        drawn = self._rows.draw(logits_BV if slots_B is not None else logits_BV[chosen], chosen)
        end = self._clock()
        self.pause.decoded(start, end, stale=any(sequence.stale for sequence in self._sequences))
        if len(rows) == len(self._sequences):
            self.filler.pace.decoded(end - start)
        return self._accept(drawn, rows)

    def _admit(self, admissions: list[Admission]) -> None:
        if admissions:
            self._memory.update()
        leaders: Leaders = {}
        for admission in admissions:
            ticket, first, row = admission.ticket, admission.first, admission.row
            request = self._requests[ticket.request_id]
            sampling = request.sampling
            stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*self._eos_ids, *sampling.stop_token_ids)
            self._rows.seat(row, admission.count, first, request.prompt_ids, sampling, stop_ids)
            samples = range(first, first + admission.count)
            version, turn = self.weights.version, self.filler.next_turn()
            group = [start_sequence(request, index, version, turn, self._decode) for index in samples]
            self._num_watched += sum(sequence.watched for sequence in group)
            self._sequences += group
            self.prompts.seat(group, row, version, leaders, more=first + admission.count < ticket.num_samples)

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
        if not ended:
            return
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
            self.prompts.forget(request_id)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        span = int(self._rows.positions_B[sources].max()) + 1
        self._rows.move(sources, targets)
        self._cache.move(sources, targets, span)
        self._memory.update()
