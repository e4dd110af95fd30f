"""What is sent and when: kinds of requests from a TOML file, drawn by weight at Poisson arrivals. Pure."""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIXES = Path(__file__).parent / "mixes"
_WORDS = (
    "a",
    "an",
    "at",
    "as",
    "am",
    "be",
    "by",
    "do",
    "go",
    "he",
    "if",
    "in",
    "is",
    "it",
    "me",
    "my",
    "no",
    "of",
    "on",
)
_PATHS = ("/v1/completions", "/v1/chat/completions")


class MixError(ValueError):
    """A mix file that cannot be used; says which entry and why."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One sort of request."""

    name: str
    path: str
    weight: float = 1.0
    words: tuple[int, int] = (16, 64)
    """Least and largest length of the prompt, prefix left out; a word is about a token."""
    prefixes: int = 0
    """So many different prefixes are shared by the requests of this kind; 0: every prompt is new from its start."""
    prefix_words: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    """Goes out as it is; model and prompt are put in."""

    def request(self, model: str, draw: random.Random) -> dict[str, Any]:
        """A body with a prompt of its own."""
        prefix = _text(self.prefix_words, random.Random(draw.randrange(self.prefixes))) if self.prefixes else ""
        text = f"{prefix} {_text(draw.randint(*self.words), draw)}".strip()
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in self.path else {"prompt": text}
        return {"model": model, **self.body, **prompt}


@dataclass(frozen=True)
class Arrival:
    """One request: when it is due, in seconds from the start, what sort it is, and its body."""

    at: float
    kind: str
    path: str
    body: dict[str, Any]


def read_mix(name: str) -> list[Kind]:
    """A mix by the name of a file here or by path; raises `MixError`."""
    path = Path(name) if name.endswith(".toml") else MIXES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in MIXES.glob("*.toml")))
        raise MixError(f"there is no mix {name!r}: name one of {known}, or a .toml file")
    try:
        entries = tomllib.loads(path.read_text()).get("kinds")
    except tomllib.TOMLDecodeError as error:
        raise MixError(f"{path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise MixError(f"{path}: at least one [[kinds]] is needed")
    return [_kind(path, place, entry) for place, entry in enumerate(entries)]


def arrivals(kinds: list[Kind], model: str, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Independent arrivals, `rate` per second on average, for `seconds`; the same seed gives the same requests."""
    draw, at = random.Random(seed), 0.0
    weights = [kind.weight for kind in kinds]
    while (at := at + draw.expovariate(rate)) < seconds:
        (kind,) = draw.choices(kinds, weights)
        yield Arrival(at, kind.name, kind.path, kind.request(model, draw))


def _kind(path: Path, place: int, entry: dict[str, Any]) -> Kind:
    where = f"{path}: kinds[{place}]"
    try:
        kind = Kind(**{**entry, "words": tuple(entry.get("words", (16, 64)))})
    except TypeError as error:
        raise MixError(f"{where}: {error}".replace("Kind.__init__() ", "")) from None
    if kind.path not in _PATHS:
        raise MixError(f"{where}: path must be one of {', '.join(_PATHS)}, got {kind.path!r}")
    if kind.weight <= 0 or len(kind.words) != 2 or not 0 < kind.words[0] <= kind.words[1]:
        raise MixError(f"{where}: weight must be above 0, words two numbers from 1 in order")
    return kind


def _text(words: int, draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=words))
