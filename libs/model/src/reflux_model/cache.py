"""Key/value memory of sequences that are being decoded: one slot per sequence, as large as what is written into it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.pages import LazyPages


@dataclass(frozen=True)
class PrefixKV:
    """Rotated keys and values of B right-padded sequences, as `prefill` leaves them.

    `keys` and `values` are (num_layers, B, num_kv_heads, L, head_size); row b is valid up to `lengths_B[b]`. It is what
    one engine hands to another (prefill/decode split): `row(b)` is contiguous and holds only the valid positions.
    """

    keys: Tensor
    values: Tensor
    lengths_B: Tensor

    def row(self, index: int) -> "PrefixKV":
        """A contiguous copy of one sequence, cut to its length (B = 1)."""
        length = int(self.lengths_B[index])
        cut = slice(index, index + 1)
        return PrefixKV(
            self.keys[:, cut, :, :length].contiguous(),
            self.values[:, cut, :, :length].contiguous(),
            self.lengths_B[cut].clone(),
        )


class SlotCache:
    """Keys and values of `num_slots` sequences of up to `max_length` positions.

    A slot takes address space for its whole length, and on the host memory only for positions that were written; `trim`
    gives it back. So a slot is one piece for attention, which a block table would have to gather in every step.
    The cache does not know which slots are in use and holds no lengths: the caller (a batch scheduler) does, and says
    for each decode step which slot and position every row has. A slot needs no clearing: a row sees positions up to its
    own only.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1 or max_length < 1:
            raise ValueError(f"a cache needs slots and positions, got {num_slots} x {max_length}")
        shape = (config.num_layers, num_slots, config.num_kv_heads, max_length, config.head_size)
        self._pages: list[LazyPages] = []
        self.keys, self.values = (self._memory(shape, dtype, torch.device(device)) for _ in range(2))

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        self._pages.append(LazyPages(math.prod(shape) * dtype.itemsize))
        return self._pages[-1].tensor(dtype).view(shape)

    @property
    def num_slots(self) -> int:
        """Sequences that fit at the same time."""
        return self.keys.shape[1]

    @property
    def max_length(self) -> int:
        """Positions per slot."""
        return self.keys.shape[3]

    def trim(self, slot: int, length: int) -> None:
        """Gives back the memory of a slot behind its first `length` positions; what lay there is lost."""
        layers, slots, heads, positions, size = self.keys.shape
        position = size * self.keys.element_size()
        head = positions * position
        firsts = [(layer * slots + slot) * heads * head for layer in range(layers)]
        if length:
            firsts = [first + number * head for first in firsts for number in range(heads)]
        width = head if length else heads * head
        for pages in self._pages:
            pages.free((first + length * position, first + width) for first in firsts)

    def insert(self, prefix: PrefixKV, rows: Tensor, slots: Tensor) -> None:
        """Copies sequence `rows[i]` of `prefix` into slot `slots[i]` (int64); one row may go to many slots.

        That is how the samples of one prompt share its prefill. Raises ValueError when the prefix is too long.
        """
        length = prefix.keys.shape[3]
        if length > self.max_length:
            raise ValueError(f"a prefix of {length} positions does not fit slots of {self.max_length}")
        self.keys[:, slots, :, :length] = prefix.keys[:, rows]
        self.values[:, slots, :, :length] = prefix.values[:, rows]

    def move(self, sources: Tensor | list[int], targets: Tensor | list[int], length: int | None = None) -> None:
        """Copies the first `length` positions (None: all) of slot `sources[i]` to slot `targets[i]`, disjoint sets.

        It keeps a batch dense: when row f has finished, the last row moves into its place.
        """
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Copies the first `length` positions of one slot to others: sequences that begin with the same tokens."""
        cut = slice(source, source + 1)
        self.keys[:, targets, :, :length] = self.keys[:, cut, :, :length]
        self.values[:, targets, :, :length] = self.values[:, cut, :, :length]

    def extract(self, slot: int, length: int) -> PrefixKV:
        """A copy of the first `length` positions of a slot, ready to be handed to another engine."""
        cut = slice(slot, slot + 1)
        return PrefixKV(
            self.keys[:, cut, :, :length].clone(),
            self.values[:, cut, :, :length].clone(),
            torch.tensor([length]),
        )
