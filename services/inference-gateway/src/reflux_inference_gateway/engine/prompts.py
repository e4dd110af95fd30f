"""How the samples of a group, and prompts that begin alike, share what is computed of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reflux_inference_gateway.engine.lanes import Lane
from reflux_inference_gateway.engine.prefix_store import BLOCK_TOKENS, PrefixStore
from reflux_inference_gateway.engine.sequences import Sequence as Sample
from reflux_inference_gateway.engine.types import ComputedPrompt, GroupRequest, PromptScores
from reflux_model.cache import PrefixKV, SlotCache

Leaders = dict[tuple[str, tuple[int, ...]], Sample]
"""Of the samples that are seated together: the first one of each beginning (salt, and the tokens of a block)."""


@dataclass(frozen=True)
class _Open:
    """A filled prompt whose group has samples without a row."""

    kv: PrefixKV
    scores: PromptScores
    serial: int
    """Of the lane whose weights computed it."""


class Prompts:
    """Owns what outlives the rows of a prompt. It is void once the weights of its lane change."""

    def __init__(self, cache: SlotCache, store: PrefixStore) -> None:
        self._cache, self._store = cache, store
        self._open: dict[str, _Open] = {}
        self._unseated: set[str] = set()
        self.seated = 0
        """Prompts since the start, once per group and weight version."""
        self.reused_tokens = 0
        """Prompt tokens since the start that other prompts had computed."""

    def adopt(self, request: GroupRequest, lane: Lane) -> None:
        """Takes over what another engine has computed of a prompt, if its weights were those of the lane."""
        given = request.given
        if given is not None and given.epoch == lane.weights.epoch and request.sampling.prompt_logprobs is None:
            self._open[request.request_id] = _Open(given.kv, [], lane.serial)
            self.reused_tokens += given.kv.keys.shape[3]

    def seat(self, group: list[Sample], row: int, leaders: Leaders, *, more: bool) -> None:
        """Prepares neighbouring rows from `row` on for samples of one group; `more` of it wait for rows.

        One sample of a group is filled, the others follow it. It may itself follow one of `leaders`.
        """
        request, end = group[0].request, group[0].prompt_end
        opened = self._open.get(request.request_id)
        (self._unseated.add if more else self.forget)(request.request_id)
        if opened is not None:
            rows = torch.arange(row, row + len(group))
            self._cache.insert(opened.kv, torch.zeros_like(rows), rows)
            if request.given is not None:
                self._store.save(request.prompt_ids[:end], group[0].salt, self._cache, row)
            for sample in group:
                sample.prompt_scores = opened.scores
                sample.fill(0)
            return
        self.seated += 1
        for sample in group[1:]:
            sample.leader, sample.shared = group[0], end
        if request.sampling.prompt_logprobs is None:
            group[0].filled = self._store.load(request.prompt_ids[:end], group[0].salt, self._cache, row)
            self.reused_tokens += group[0].filled
            self._follow(group[0], leaders)

    def filled(self, sample: Sample, row: int, *, first: bool) -> None:
        """A prompt was computed in a row by the weights of its lane, for the `first` time or again after a swap."""
        request, end = sample.request, sample.prompt_end
        self._store.save(request.prompt_ids[:end], sample.salt, self._cache, row)
        if first and request.hand_over:
            sample.computed = ComputedPrompt(self._cache.extract(row, end), sample.lane.weights.epoch)
        if first and request.request_id in self._unseated:
            kept = _Open(self._cache.extract(row, end), sample.prompt_scores, sample.lane.serial)
            self._open[request.request_id] = kept

    def share(self, row: int, sample: Sample, followers: Sequence[tuple[int, Sample]]) -> None:
        """Copies a filled prompt's beginning to the rows that wait for it."""
        for shared in {one.shared for _, one in followers}:
            self._cache.share(row, [at for at, one in followers if one.shared == shared], shared)
        for _, one in followers:
            one.leader, one.filled = None, one.shared
            if one.request is sample.request:
                one.prompt_scores = sample.prompt_scores

    def forget_all(self, serial: int) -> None:
        """The weights of a lane have changed. Blocks in the store are never found again and make room for others."""
        self._open = {name: kept for name, kept in self._open.items() if kept.serial != serial}

    def forget(self, request_id: str) -> None:
        """All samples of a group have rows, or have ended."""
        self._unseated.discard(request_id)
        self._open.pop(request_id, None)

    def _follow(self, sample: Sample, leaders: Leaders) -> None:
        prompt, filled = sample.request.prompt_ids, sample.filled or 0
        if sample.prompt_end < BLOCK_TOKENS:
            return
        leader = leaders.setdefault((sample.salt, prompt[:BLOCK_TOKENS]), sample)
        if leader is not sample:
            end = min(sample.prompt_end, leader.prompt_end)
            shared = _common(prompt[:end], leader.request.prompt_ids)
            if shared > filled:
                sample.leader, sample.shared = leader, shared
                self.reused_tokens += shared - filled


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common beginning; `tokens` is the shorter one."""
    return next((at for at, token in enumerate(tokens) if token != others[at]), len(tokens))
