"""Which replica computes a prompt for the one that decodes it, or why none should. Pure; ADR-0029 says why so."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_inference_gateway.routing.prefix_tree import PrefixTree, prompt_bytes


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One replica as pairing sees it."""

    name: str
    version: int
    epoch: int
    """Broker epoch of that version."""
    location: str = ""
    """Topology path, outermost level first and levels parted by `/`; the last one is the node. Empty when unknown."""
    queued_tokens: int = 0
    """Prompt tokens that this gateway sent there and that are not computed yet."""
    order: int = 0
    """Order of registration, the last tie-break."""


@dataclass(frozen=True)
class Paired:
    """The choice: a replica's name, or why the decoding one computes the prompt itself."""

    name: str = ""
    why: str = ""
    """"short", "cached" or "nobody"."""


class Pairing:
    """Pays for a hand-over only where it saves a long prefill.

    What is missing of the prompt at the decoding replica decides: under `min_tokens` it computes that itself. Else the
    prefill replica of the same weights (version and epoch) with the smallest queue + `far_tokens` x distance takes it;
    the distance is the number of levels below the last common one, 0 on one node and 1 in one rack. So the own rack is
    preferred until its queue is `far_tokens` longer, and a full rack does not hold up the others.
    """

    def __init__(self, min_tokens: int = 256, far_tokens: int = 2048) -> None:
        self._min_tokens, self._far_tokens = min_tokens, far_tokens
        self._tree = PrefixTree()

    def choose(
        self, decode: Peer, peers: Sequence[Peer], prompt: tuple[int, ...], salt: str, tried: Sequence[str] = ()
    ) -> Paired:
        """Pairs, and notes that the decoding replica will have the prompt; `tried` are left out."""
        missing = self.missing(decode.name, prompt, salt)
        if not tried:
            self._tree.insert(prompt_bytes(prompt), salt, decode.name)
            if missing < self._min_tokens:
                return Paired(why="short" if len(prompt) < self._min_tokens else "cached")
        fit = [
            one
            for one in peers
            if (one.version, one.epoch) == (decode.version, decode.epoch) and one.name not in (*tried, decode.name)
        ]
        if not fit:
            return Paired(why="nobody")
        return Paired(min(fit, key=lambda one: (self.cost(decode, one), one.order)).name)

    def missing(self, name: str, prompt: tuple[int, ...], salt: str) -> int:
        """Tokens that a replica would have to compute; the last one is always computed where it is decoded."""
        known = self._tree.matched(prompt_bytes(prompt), salt).get(name, 0.0)
        return max(0, len(prompt) - 1 - round(known * len(prompt)))

    def cost(self, decode: Peer, one: Peer) -> int:
        """What is compared, in tokens."""
        return one.queued_tokens + self._far_tokens * distance(decode.location, one.location)


def distance(here: str, there: str) -> int:
    """Levels below the last common one of two places; an unknown place is as far as the other one is deep."""
    mine, other = (tuple(part for part in place.split("/") if part) for place in (here, there))
    common = 0
    for left, right in zip(mine, other, strict=False):
        if left != right:
            break
        common += 1
    return max(len(mine), len(other)) - common
