"""The groups of the mix: 64 of 8 samples and 4 of 64, prompts of 1,024 tokens, long-tailed lengths. Pure."""

import random
from dataclasses import dataclass

PROMPT_TOKENS = 1024
MAX_TOKENS = 512
_MEAN_TOKENS = 128
_SIGMA = 0.8326
"""Of the logarithm: lengths vary by their mean (coefficient of variation 1), the tail is cut at MAX_TOKENS."""
_CHARACTERS_PER_TOKEN = 4
_VOCABULARY = 50_000


@dataclass(frozen=True)
class Group:
    """One prompt of the mix."""

    number: int
    num_samples: int

    def text(self) -> str:
        """The prompt for doors that take text: prefixes of two groups part at once."""
        head = f"G{self.number:03d} "
        return head + f"{self.number * 7919 % 10_007:05d} and so on. " * 200

    def ids(self) -> list[int]:
        """The prompt as token ids; the first one is the group's number."""
        return [self.number, *((self.number * 7919 + 31 * place) % _VOCABULARY for place in range(1, PROMPT_TOKENS))]

    def lengths(self, seed: int) -> list[int]:
        """Tokens of its samples; whoever is first gets the first, so that all ways draw the same lengths."""
        draw = random.Random(f"{seed} {self.number}")
        middle = _MEAN_TOKENS / 2.718281828459045 ** (_SIGMA**2 / 2)
        drawn = (middle * draw.lognormvariate(0, _SIGMA) for _ in range(self.num_samples))
        return [max(8, min(MAX_TOKENS, round(length))) for length in drawn]


def groups(small: int = 64, large: int = 4) -> list[Group]:
    """All groups of a mix by number."""
    return [Group(number, 8 if number < small else 64) for number in range(small + large)]


def group_of(prompt: str | list[int]) -> int:
    """The number of the group that a prompt belongs to."""
    return int(prompt[1:4]) if isinstance(prompt, str) else prompt[0]
