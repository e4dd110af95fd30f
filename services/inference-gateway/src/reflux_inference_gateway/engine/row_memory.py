"""How much memory the rows hold, and when they give it back."""

from reflux_inference_gateway.engine.batcher import Batcher
from reflux_model.cache import SlotCache


class RowMemory:
    """Owns the bound of the KV cache's memory. Rows keep what an earlier sample wrote until the bound is reached."""

    def __init__(self, cache: SlotCache, batcher: Batcher) -> None:
        """The bound is the batcher's: tokens of all rows together."""
        self._cache, self._batcher = cache, batcher
        self._held = [0] * cache.num_slots
        """Per row, positions that may have been written since it gave back memory."""

    def update(self) -> None:
        """Samples have come or moved: counts what they may write. Above the bound, rows give back what nobody needs."""
        active = self._batcher.num_active
        needed = [self._batcher.seat(row).tokens for row in range(active)]
        self._held[:active] = map(max, self._held, needed)
        if sum(self._held) > self._batcher.max_tokens:
            needed += [0] * (len(self._held) - active)
            for row, (held, tokens) in enumerate(zip(self._held, needed, strict=True)):
                if held > tokens:
                    self._cache.trim(row, tokens)
            self._held = needed
