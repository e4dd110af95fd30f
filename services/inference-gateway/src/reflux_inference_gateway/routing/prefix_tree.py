"""Which replica has probably computed which prompt prefix: a radix tree over prompt blocks, bounded, per salt."""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

_BLOCK_BYTES = 64
"""16 token ids of 4 bytes, or 64 characters: the block of 16 tokens by which engines share a cache."""
_NODE_BYTES = 512
"""What a node costs besides its label: object, dict of children, set of holders."""
_MAX_PROMPT_BYTES = 1 << 16
"""Beyond 16k tokens a longer match does not change the choice any more."""


@dataclass(eq=False, slots=True)
class _Node:
    label: bytes
    """Whole blocks."""
    parent: "_Node | None"
    children: "dict[bytes, _Node]" = field(default_factory=dict)
    """By the first block of the child's label."""
    holders: set[str] = field(default_factory=set)


class PrefixTree:
    """Remembers prompts by the replica that they were sent to.

    A holder of a node holds all nodes above it. Nodes are kept in order of their last use, and a use of a node uses
    all above it later than itself: so the least recent node is always a leaf, and eviction (on insertion, no timer: a
    burst cannot outrun it) never leaves a hole. Salts have roots of their own and share nothing.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._roots: dict[str, _Node] = {}
        self._recency: OrderedDict[_Node, str] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Labels plus an allowance for each node; at most `max_bytes` after every insertion."""
        return self._num_bytes

    def matched(self, prompt: bytes, salt: str) -> dict[str, float]:
        """By replica the part of the prompt, above 0 and up to 1, that it has seen in whole blocks."""
        found: dict[str, float] = {}
        at = 0
        node = self._roots.get(salt)
        while node is not None and (node := node.children.get(prompt[at : at + _BLOCK_BYTES])) is not None:
            length = _common(node.label, prompt, at)
            at += length
            found.update(dict.fromkeys(node.holders, at / len(prompt)))
            if length < len(node.label):
                break
        return found

    def insert(self, prompt: bytes, salt: str, name: str) -> None:
        """Notes that a replica computes this prompt, and evicts what was not used for longest."""
        data = prompt[: min(len(prompt), _MAX_PROMPT_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES]
        if not data:
            return
        node, at = self._roots.setdefault(salt, _Node(b"", None)), 0
        path: list[_Node] = []
        while at < len(data):
            child = node.children.get(data[at : at + _BLOCK_BYTES])
            if child is None:
                child = self._add(data[at:], node, salt)
            elif (length := _common(child.label, data, at)) < len(child.label):
                child = self._cut(child, length, salt)
            child.holders.add(name)
            path.append(child)
            node, at = child, at + len(child.label)
        for used in reversed(path):
            self._recency.move_to_end(used)
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._recency)))

    def forget(self, name: str) -> None:
        """Drops all that a replica holds."""
        for node in list(self._recency):
            node.holders.discard(name)
            if not node.holders:
                self._remove(node)

    def _add(self, label: bytes, parent: _Node, salt: str) -> _Node:
        node = _Node(label, parent)
        parent.children[label[:_BLOCK_BYTES]] = node
        self._recency[node] = salt
        self._num_bytes += len(label) + _NODE_BYTES
        return node

    def _cut(self, node: _Node, length: int, salt: str) -> _Node:
        """Puts a node with the first `length` bytes of a label above the rest of it."""
        assert node.parent is not None
        self._num_bytes -= length
        upper = self._add(node.label[:length], node.parent, salt)
        upper.holders = set(node.holders)
        node.label, node.parent = node.label[length:], upper
        upper.children[node.label[:_BLOCK_BYTES]] = node
        return upper

    def _remove(self, node: _Node) -> None:
        salt = self._recency.pop(node)
        self._num_bytes -= len(node.label) + _NODE_BYTES
        parent = node.parent
        assert parent is not None
        del parent.children[node.label[:_BLOCK_BYTES]]
        if parent.parent is None and not parent.children:
            del self._roots[salt]


def prompt_bytes(prompt: tuple[int, ...] | bytes) -> bytes:
    """The form of a prompt that the tree takes: text as it is, 4 bytes for each token id."""
    return prompt if isinstance(prompt, bytes) else array("I", prompt).tobytes()


def _common(label: bytes, data: bytes, at: int) -> int:
    """Bytes, in whole blocks, by which a label agrees with the data from `at`; the first block is known to agree."""
    if data.startswith(label, at):
        return len(label)
    end = _BLOCK_BYTES
    while label[end : end + _BLOCK_BYTES] == data[at + end : at + end + _BLOCK_BYTES]:
        end += _BLOCK_BYTES
    return end
