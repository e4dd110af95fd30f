"""Finished samples and token deltas to OpenAI's JSON, whole or as stream events. Pure apart from the tokenizer."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from reflux_inference_gateway.engine.openai_request import CompletionCall
from reflux_inference_gateway.engine.stops import TextCursor, text_pieces
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import FinishedSample, TokenDelta, TokenScore


@dataclass
class ResponseWriter:
    """Owns the identity of one answer: id, model, time, and the running text of streamed choices."""

    call: CompletionCall
    call_id: str
    model_id: str
    tokenizer: TextTokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    _cursors: dict[int, TextCursor] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, finished: dict[int, FinishedSample]) -> dict[str, Any]:
        """The answer of a request without streaming; `finished` by choice index."""
        choices = [self._choice(index, finished[index]) for index in sorted(finished)]
        kind = "text_completion" if self.call.kind == "completion" else "chat.completion"
        answer = self._envelope(kind, choices)
        answer["usage"] = self.usage(finished.values())
        return answer

    def delta(self, choice: int, token: TokenDelta) -> bytes | None:
        """The event of one streamed token; None while its text is held back and nothing else is asked for."""
        cursor = self._cursor(choice)
        cursor.push(token.token_id)
        text = cursor.take(final=False)
        fields: dict[str, Any] = {}
        if self.call.logprobs:
            fields["logprobs"] = self._logprobs([token.token_id], [token.logprob], [token.top_logprobs], choice, [text])
        if self.call.return_token_ids:
            fields["token_ids"] = [token.token_id]
        if not text and not fields:
            return None
        return self._event(choice, text, fields)

    def last(self, choice: int, sample: FinishedSample) -> bytes:
        """The event that ends a choice: the rest of its text and the finish reason."""
        cursor = self._cursor(choice)
        cursor.finish()
        spans = {"weight_versions": _spans(sample)}
        return self._event(choice, cursor.take(final=True), spans, finish_reason=sample.finish_reason)

    def first(self, choice: int) -> bytes | None:
        """The event that opens a chat choice with its role; None for completions."""
        if self.call.kind != "chat":
            return None
        choices = [{"index": choice, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        return event(self._envelope("chat.completion.chunk", choices))

    def usage_event(self, generated_tokens: int) -> bytes:
        """The event with usage that `stream_options.include_usage` asks for."""
        kind = "text_completion" if self.call.kind == "completion" else "chat.completion.chunk"
        return event({**self._envelope(kind, []), "usage": self._usage(generated_tokens)})

    def usage(self, finished: Any) -> dict[str, int]:
        """Token counts of finished samples."""
        return self._usage(sum(len(sample.token_ids) for sample in finished))

    def _usage(self, generated_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.call.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": prompt_tokens + generated_tokens,
        }

    def _choice(self, index: int, sample: FinishedSample) -> dict[str, Any]:
        text = self.tokenizer.decode(sample.token_ids) if sample.text is None else sample.text
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason, "logprobs": None}
        if self.call.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if self.call.logprobs:
            pieces = text_pieces(self.tokenizer.decode, sample.token_ids)
            tops = sample.top_logprobs or [{} for _ in sample.token_ids]
            choice["logprobs"] = self._logprobs(sample.token_ids, sample.logprobs, tops, index, pieces)
        if self.call.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = list(self.call.prompts[index // self.call.num_samples])
        if self.call.sampling.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [None, *map(self._ranked, sample.prompt_scores)]
        choice["weight_versions"] = _spans(sample)
        return choice

    def _ranked(self, scores: dict[int, TokenScore]) -> dict[str, dict[str, Any]]:
        return {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": self.tokenizer.piece(token)}
            for token, one in scores.items()
        }

    def _logprobs(
        self,
        token_ids: list[int],
        logprobs: list[float],
        tops: list[dict[int, float]],
        choice: int,
        pieces: list[str],
    ) -> dict[str, Any]:
        names = [self.tokenizer.piece(token) for token in token_ids]
        if self.call.kind == "chat":
            rows = zip(names, logprobs, tops, strict=True)
            return {"content": [self._chat_logprob(name, value, top) for name, value, top in rows]}
        offsets = []
        for piece in pieces:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(piece)
        named = [{self.tokenizer.piece(token): value for token, value in top.items()} for top in tops]
        for name, value, top in zip(names, logprobs, named, strict=True):
            if top:
                top.setdefault(name, value)
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": named if self.call.sampling.top_logprobs else None,
            "text_offset": offsets,
        }

    def _chat_logprob(self, name: str, value: float, top: dict[int, float]) -> dict[str, Any]:
        alternatives = [_named(self.tokenizer.piece(token), other) for token, other in top.items()]
        return {**_named(name, value), "top_logprobs": alternatives}

    def _cursor(self, choice: int) -> TextCursor:
        if choice not in self._cursors:
            self._cursors[choice] = TextCursor(self.tokenizer.decode, self.call.sampling.stops)
        return self._cursors[choice]

    def _event(self, choice: int, text: str, fields: dict[str, Any], *, finish_reason: str | None = None) -> bytes:
        body: dict[str, Any] = {"index": choice, "finish_reason": finish_reason, "logprobs": None, **fields}
        if self.call.kind == "chat":
            body["delta"] = {"content": text} if text else {}
            return event(self._envelope("chat.completion.chunk", [body]))
        body["text"] = text
        return event(self._envelope("text_completion", [body]))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model_id,
            "choices": choices,
        }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _named(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode())}


def _spans(sample: FinishedSample) -> list[dict[str, int]]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in sample.spans]
