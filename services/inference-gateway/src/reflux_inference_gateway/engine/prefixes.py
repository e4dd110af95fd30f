"""Which blocks of computed prompts are kept, and where. Pure: no torch, no clock, no threads.

A block is `block_tokens` tokens of a prompt at a multiple of that position, together with everything before it. The
blocks of one prompt are a chain; the end of a chain is always used less recently than its beginning, so that what is
evicted leaves no unreachable rest. Tokens are compared themselves, never a hash of them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_Key = tuple[int | str, tuple[int, ...]]
"""The block before (at a prompt's beginning: the salt), and the tokens of the block."""


@dataclass(frozen=True)
class _Block:
    place: int
    number: int
    """Never used again: what hangs on an evicted block is not found by a later one at the same place."""


@dataclass
class PrefixIndex:
    """Owns the places of a pool of `num_blocks` blocks; the least recently used ones make room."""

    num_blocks: int
    block_tokens: int
    _blocks: OrderedDict[_Key, _Block] = field(default_factory=OrderedDict)
    _free: list[int] = field(default_factory=list)
    _numbers: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Places of the longest known chain of whole blocks at the beginning of `tokens`."""
        keys, _ = self._walk(tokens, salt)
        self._use(keys)
        return [self._blocks[key].place for key in keys]

    def add(self, tokens: Sequence[int], salt: str = "") -> list[tuple[int, int]]:
        """Makes room for the whole blocks of `tokens`; returns (number of the block in the prompt, place) to be filled.

        A prompt of more blocks than the pool has is kept as far as it fits.
        """
        keys, parent = self._walk(tokens, salt)
        self._use(keys)
        fresh: list[tuple[int, int]] = []
        for number in range(len(keys), min(len(tokens) // self.block_tokens, self.num_blocks)):
            key = (parent, self._block(tokens, number))
            self._blocks[key] = _Block(self._take(), self._numbers)
            parent, self._numbers = self._numbers, self._numbers + 1
            keys.append(key)
            fresh.append((number, self._blocks[key].place))
        self._use(keys)
        return fresh

    def _walk(self, tokens: Sequence[int], salt: str) -> tuple[list[_Key], int | str]:
        keys: list[_Key] = []
        parent: int | str = salt
        for number in range(len(tokens) // self.block_tokens):
            key = (parent, self._block(tokens, number))
            block = self._blocks.get(key)
            if block is None:
                break
            parent = block.number
            keys.append(key)
        return keys, parent

    def _block(self, tokens: Sequence[int], number: int) -> tuple[int, ...]:
        return tuple(tokens[number * self.block_tokens : (number + 1) * self.block_tokens])

    def _use(self, keys: list[_Key]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _take(self) -> int:
        # The chain that is being added was used last: as long as it fits the pool, another one is evicted.
        return self._free.pop() if self._free else self._blocks.popitem(last=False)[1].place
