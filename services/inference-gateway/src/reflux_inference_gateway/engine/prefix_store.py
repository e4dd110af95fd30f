"""Keys and values of computed prompts, for later prompts that begin alike; the salt names the weights, too."""

from collections.abc import Sequence

import torch

from reflux_inference_gateway.engine.prefixes import PrefixIndex
from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig

BLOCK_TOKENS = 16


class PrefixStore:
    """Owns a pool of blocks of `BLOCK_TOKENS` positions, all layers together; its size never changes."""

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype) -> None:
        """Allocates `num_blocks` blocks; 0 keeps nothing."""
        self._index = PrefixIndex(num_blocks, BLOCK_TOKENS)
        shape = (num_blocks, config.num_layers, config.num_kv_heads, BLOCK_TOKENS, config.head_size)
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)

    def load(self, tokens: Sequence[int], salt: str, cache: SlotCache, row: int) -> int:
        """Copies what is known of the beginning of `tokens` into a row; returns the number of positions."""
        places = self._index.find(tokens, salt)
        known = len(places) * BLOCK_TOKENS
        if places:
            for pool, memory in ((self._keys, cache.keys), (self._values, cache.values)):
                memory[:, row, :, :known] = pool[places].permute(1, 2, 0, 3, 4).flatten(2, 3)
        return known

    def save(self, tokens: Sequence[int], salt: str, cache: SlotCache, row: int) -> None:
        """Keeps the whole blocks of `tokens`, whose keys and values lie in a row."""
        fresh = self._index.add(tokens, salt)
        if fresh:
            places = [place for _, place in fresh]
            start, end = fresh[0][0] * BLOCK_TOKENS, (fresh[-1][0] + 1) * BLOCK_TOKENS
            for pool, memory in ((self._keys, cache.keys), (self._values, cache.values)):
                blocks = memory[:, row, :, start:end].unflatten(2, (len(fresh), BLOCK_TOKENS))
                pool[places] = blocks.permute(2, 0, 1, 3, 4)


def block_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Memory of one block."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * BLOCK_TOKENS * element_bytes
