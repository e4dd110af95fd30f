"""Samples while an OpenAI-style answer draws them: from choices, whole or in pieces, to finished samples. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reflux.common.v1.common_pb2 import Sample, VersionSpan

_REASONS = {"length": "length", "abort": "abort"}
"""Whatever else an engine says ("stop", "eos", a matched string) is a "stop" of ours."""


class NotTokens(ValueError):
    """A choice came without token ids, or with another number of log-probs than of tokens."""


@dataclass
class Drawing:
    """Owns the samples of one call until they are finished.

    `serving` is the weight version that the replica says it serves. Such engines do not mark their tokens: a token gets
    the version that was known when it came, which after a swap lags by a heartbeat at most.
    """

    first_sample: int
    num_samples: int
    serving: Callable[[], int]
    _open: dict[int, Sample] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._open = {index: Sample(index=self.first_sample + index) for index in range(self.num_samples)}

    @property
    def missing(self) -> int:
        """Samples that are not finished."""
        return len(self._open)

    def take(self, choices: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """Adds pieces; returns the samples that they finished. Raises NotTokens, or KeyError for a sample that nobody
        asked for or that is finished already.
        """
        finished = []
        for choice in choices:
            index = choice["index"]
            sample = self._open[index]
            self._add(sample, choice)
            if reason := choice.get("finish_reason"):
                sample.finish_reason = _REASONS.get(reason, "stop")
                finished.append(self._open.pop(index))
        return finished

    def rest(self) -> list[Sample]:
        """What is not finished, as aborted samples with the tokens so far."""
        left, self._open = list(self._open.values()), {}
        for sample in left:
            sample.finish_reason = "abort"
        return left

    def _add(self, sample: Sample, choice: Mapping[str, Any]) -> None:
        token_ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if token_ids is None:
            raise NotTokens("the engine sends no token ids: it has to know return_token_ids")
        if len(token_ids) != len(logprobs):
            raise NotTokens(f"{len(token_ids)} tokens came with {len(logprobs)} log-probs")
        if not token_ids:
            return
        start, version = len(sample.token_ids), self.serving()
        sample.token_ids.extend(token_ids)
        sample.logprobs.extend(logprobs)
        end = start + len(token_ids)
        if sample.versions and sample.versions[-1].version == version:
            sample.versions[-1].end = end
        else:
            sample.versions.append(VersionSpan(version=version, start=start, end=end, kv_version=version))
