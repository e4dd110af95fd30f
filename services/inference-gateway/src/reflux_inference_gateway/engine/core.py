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
from reflux_inference_gateway.engine.lanes import OWN, Lanes, projections
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
from reflux_model.lora import scored

Event = FinishedSample | TokenDelta
Deliver = Callable[[str, Event], None]
Settled = Callable[[SwapFigures], None]


class EngineCore:
    """Owns the KV cache, the rows and the weights: the model's own, and those of adapters that are served beside it."""

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
        self.lanes = Lanes(weights, lambda: PauseMeter(settled))
        self.generated_tokens = 0
        self._clock = clock
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
            config,
            self._cache,
            self._rows,
            self.prompts,
            self.lanes,
            chunk_tokens=options.prefill_tokens_per_step,
            clock=clock,
        )
        self._sequences: list[Sequence] = []
        self._num_watched = 0
        self._requests: dict[str, GroupRequest] = {}
        self._outstanding: dict[str, int] = {}

    @property
    def weights(self) -> Weights:
        """The current ones of the model itself."""
        return self.lanes.own.weights

    def submit(self, request: GroupRequest) -> None:
        """Queues a group; its id must not be in use, and its model must be served."""
        sampling = request.sampling
        self.batcher.add(Ticket(request.request_id, request.num_samples, len(request.prompt_ids), sampling.max_tokens))
        self._requests[request.request_id] = request
        self._outstanding[request.request_id] = request.num_samples
        self.prompts.adopt(request, self.lanes.of(request.model))

    @torch.inference_mode()
    def abort(self, request_id: str) -> bool:
        """Ends a group's samples with what they have; False when there is no such group."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        rows, dropped = self.batcher.abort(request_id)
        for index in dropped:
            waiting = start_sequence(request, index, self.lanes.of(request.model), 0, self._decode)
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
    def score(self, token_ids: Seq[int], model: str = OWN) -> Scored:
        """Log-probs as the learner computes them; needs two tokens at least, and no row."""
        weights = self.lanes.of(model).weights
        adapter = (weights.params, weights.adapter) if weights.adapter else None
        scores = scored(self.weights.params, self._config, token_ids, adapter)
        return Scored(scores.tolist(), weights.version, weights.epoch)

    def swap(self, weights: Weights, *, overwritten: bool = False, model: str = OWN) -> None:
        """Makes new weights of a model current, which takes no time: its running sequences are stale from now on, and
        prefilled again chunk by chunk in the next steps, or go on with the old keys and values. Until the first of them
        is fresh its others go on under the old weights, unless those are `overwritten`; the lane is `settled` when
        nobody does. Sequences of other models do not notice; an adapter that is not served yet is from now on.
        """
        if model not in self.lanes:
            self.lanes.open(model, weights)
            return
        lane = self.lanes.of(model)
        self.prompts.forget_all(lane.serial)
        keep, turn = self.options.kv_after_swap == "keep", self.filler.next_turn()
        generated = self._rows.generated_B[: len(self._sequences)].tolist()
        for sequence, count in zip(self._sequences, generated, strict=True):
            if sequence.lane is not lane:
                continue
            if keep and sequence.ready:
                sequence.spans.swap(count, weights.version, kept_kv=True)
            else:
                sequence.outdate(turn)
        lane.swap(weights, self._clock(), keep_old=not (keep or overwritten))

    def close(self, model: str) -> list[str]:
        """Serves an adapter no longer; returns the requests that end with it."""
        ended = [name for name, request in self._requests.items() if request.model == model]
        for request_id in ended:
            self.abort(request_id)
        self.lanes.close(model)
        return ended

    def pending_tokens(self) -> int:
        """Tokens that running and waiting samples may still cost."""
        unfilled = self.filler.pending_tokens(self._sequences)
        return self.batcher.waiting_tokens + unfilled + self._rows.remaining_tokens(len(self._sequences))

    @torch.inference_mode()
    def step(self) -> bool:
        """Fills a chunk and decodes a token for every row that can; False when there was nothing to do. Nobody is
        admitted while rows wait to be filled: another prompt would make them wait longer.
        """
        begun = {sequence.lane for sequence in self._sequences if sequence.begun}
        for lane in self.lanes:
            if lane not in begun:
                lane.idle(self._clock())
        if all(sequence.ready for sequence in self._sequences):
            self._admit(self.batcher.admit())
        if not self._sequences:
            return False
        if not all(sequence.ready for sequence in self._sequences):
            self.filler.advance(self._sequences)
        rows = self._rows_to_decode()
        if rows:
            self._finish(self._decode_rows(rows))
        return True

    def _rows_to_decode(self) -> list[int]:
        """Of each model the rows that are ready; before there is one, those that can go on under its old weights."""
        ready = {sequence.lane for sequence in self._sequences if sequence.ready}
        lingering = {sequence.lane for sequence in self._sequences if sequence.lingering}
        for lane in self.lanes:
            if lane in ready or lane not in lingering:
                lane.old = None
        return [
            row
            for row, sequence in enumerate(self._sequences)
            if (sequence.ready if sequence.lane.old is None else sequence.lingering)
        ]

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
        seated = self._sequences[:span] if slots_B is None else [self._sequences[row] for row in rows]
        routed = projections([sequence.lane.decoding for sequence in seated])
        params = self.lanes.own.decoding.params
        logits_BV = decode_step(params, self._config, last_B, self._cache, positions_B, slots_B, routed)
        drawn = self._rows.draw(logits_BV if slots_B is not None else logits_BV[chosen], chosen)
        end = self._clock()
        stale = {sequence.lane for sequence in self._sequences if sequence.stale}
        for lane in {self._sequences[row].lane for row in rows}:
            lane.pause.decoded(start, end, stale=lane in stale)
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
            lane, turn = self.lanes.of(request.model), self.filler.next_turn()
            group = [start_sequence(request, index, lane, turn, self._decode) for index in samples]
            self._num_watched += sum(sequence.watched for sequence in group)
            self._sequences += group
            self.prompts.seat(group, row, leaders, more=first + admission.count < ticket.num_samples)

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
