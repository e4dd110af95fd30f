"""Stop strings over token borders, and text that may be shown while a stop string could still begin in it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[int]], str]
_REPLACEMENT = "\ufffd"


@dataclass
class TextCursor:
    """Owns the text of one sequence as its tokens arrive.

    Tokens are decoded from a moving offset (the last position where the text was whole), so that the cost per token
    does not grow with the length, and a character that is spread over tokens is held back until it is complete.
    """

    decode: Decode
    stops: tuple[str, ...] = ()
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = field(default_factory=list)
    _prefix: int = 0
    _read: int = 0
    _shown: int = 0

    def push(self, token: int) -> bool:
        """Adds a token; True when a stop string is complete now. `text` then ends before that string."""
        self._tokens.append(token)
        before = self.decode(self._tokens[self._prefix : self._read])
        after = self.decode(self._tokens[self._prefix :])
        if len(after) > len(before) and not after.endswith(_REPLACEMENT):
            return self._append(after[len(before) :])
        return False

    def finish(self) -> None:
        """No more tokens: what was held back as an incomplete character becomes text as it is."""
        if self.stopped:
            return
        before = self.decode(self._tokens[self._prefix : self._read])
        after = self.decode(self._tokens[self._prefix :])
        self._append(after[len(before) :])

    def take(self, *, final: bool) -> str:
        """Text that was not taken before; a possible beginning of a stop string stays back unless `final`."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._open_suffix()
        fresh = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def _append(self, fresh: str) -> bool:
        seen = len(self.text)
        self.text += fresh
        self._prefix, self._read = self._read, len(self._tokens)
        first = min((at for at in self._find(seen) if at >= 0), default=-1)
        if first >= 0:
            self.text, self.stopped = self.text[:first], True
        return self.stopped

    def _find(self, seen: int) -> list[int]:
        return [self.text.find(stop, max(0, seen - len(stop) + 1)) for stop in self.stops]

    def _open_suffix(self) -> int:
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0


def text_pieces(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; their concatenation is the whole text."""
    cursor = TextCursor(decode)
    pieces = []
    for token in token_ids:
        cursor.push(token)
        pieces.append(cursor.take(final=True))
    cursor.finish()
    if pieces:
        pieces[-1] += cursor.take(final=True)
    return pieces
