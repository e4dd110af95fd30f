"""Owns the notation of node sets that Slurm uses: "gb[001-018,020],login" (man page of scontrol, `show hostnames`)."""

import itertools
import re
from collections.abc import Iterable

from reflux_placement.errors import InvalidTopology

MAX_NAMES = 1 << 20
_PIECE = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def expand(hostlist: str) -> list[str]:
    """All names of a list, in its order. Several brackets in one name multiply. Raises InvalidTopology."""
    names: list[str] = []
    for word in _split(hostlist):
        parts = _PIECE.split(word)
        choices = [[part] if index % 2 == 0 else _ranges(part, hostlist) for index, part in enumerate(parts)]
        size = 1
        for each in choices:
            size *= len(each)
        if len(names) + size > MAX_NAMES:
            raise InvalidTopology("hostlist", hostlist[:80], f"names more than {MAX_NAMES} nodes")
        for pick in itertools.product(*choices):
            name = "".join(pick)
            if not _NAME.fullmatch(name):
                raise InvalidTopology("hostlist", hostlist[:80], f"{name!r} is no node name")
            names.append(name)
    return names


def compress(names: Iterable[str]) -> str:
    """The short form of a set of names; neighbours that differ in their last number share a bracket."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
            continue
        head, digits, tail = match.groups()
        # The width is part of a name only with leading zeros: 9 and 10 go together, 09 and 10 too, 9 and 010 don't.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((head, tail, width), []).append(int(digits))
    _widen(groups)
    words = [_word(*key, sorted(numbers)) for key, numbers in groups.items() if numbers]
    return ",".join([*words, *plain])


def _widen(groups: dict[tuple[str, str, int], list[int]]) -> None:
    """Moves numbers without leading zeros (10) to the padded ones of their width (01 .. 09), where there are any."""
    for (head, tail, width), numbers in list(groups.items()):
        loose = groups.get((head, tail, 0))
        if width and loose:
            numbers += [number for number in loose if len(str(number)) == width]
            loose[:] = [number for number in loose if len(str(number)) != width]


def _word(head: str, tail: str, width: int, numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
    inner = ",".join(texts)
    return f"{head}{inner}{tail}" if len(numbers) == 1 else f"{head}[{inner}]{tail}"


def _split(hostlist: str) -> list[str]:
    """Splits at the commas outside brackets."""
    words, depth, start = [], 0, 0
    for index, char in enumerate(hostlist):
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            words.append(hostlist[start:index])
            start = index + 1
    if depth != 0:
        raise InvalidTopology("hostlist", hostlist[:80], "its brackets do not match")
    words.append(hostlist[start:])
    return [word for word in (word.strip() for word in words) if word]


def _ranges(text: str, hostlist: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise InvalidTopology("hostlist", hostlist[:80], f"[{text}] is no list of numbers and ranges")
        first, last = int(low), int(high or low)
        if last < first or last - first >= MAX_NAMES:
            raise InvalidTopology("hostlist", hostlist[:80], f"the range {piece} counts down or is too long")
        names += [f"{number:0{len(low)}d}" for number in range(first, last + 1)]
    return names
