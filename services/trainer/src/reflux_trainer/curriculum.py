"""Which problem a prompt asks: the next one, or of several next ones one that the policy can learn from. Pure."""

from collections.abc import Mapping, Sequence

CANDIDATES = 4
"""Problems that a prompt chooses from; the others are never asked, so that none is asked twice."""
MAX_STRATA = 64
"""Kinds of problems that are told apart; further ones share a rate."""
_OTHERS = "others"
_FLOOR = 0.1
"""Weight of a kind that is always or never solved, in parts of the best: what was learned is not forgotten, and what
could not be learned is tried again."""
_STEP = 0.05
"""Share of a group in its kind's rate: the last twenty groups count most."""
_UNKNOWN = 0.5
"""Rate of a kind that was never asked."""


class PassRates:
    """Running pass rate per kind of problem, and the choice by it.

    A kind weighs p (1 - p): the variance of a right answer, and with it the share of groups whose answers differ, is
    largest at p = 1/2 ("learnability", arXiv 2502.12272). Groups of equal rewards teach nothing, but their answers had
    to be generated and verified.
    """

    def __init__(self, known: Mapping[str, float] | None = None) -> None:
        """`known`: rates by kind, as `figures` told them."""
        self._rates = dict(known or {})

    def observe(self, stratum: str, solved: float) -> None:
        """The share of a group's answers that are wholly right; trained or filtered does not matter."""
        name = self._name(stratum)
        rate = self._rates.get(name, _UNKNOWN)
        self._rates[name] = rate + _STEP * (solved - rate)

    def weight(self, stratum: str) -> float:
        """From `_FLOOR` to 1."""
        rate = self._rates.get(self._name(stratum), _UNKNOWN)
        return max(_FLOOR, 4.0 * rate * (1.0 - rate))

    def choose(self, strata: Sequence[str], draw: float) -> int:
        """Position of the kind that is taken: each with a probability in proportion to its weight; `draw` in [0, 1)."""
        weights = [self.weight(stratum) for stratum in strata]
        left = draw * sum(weights)
        for place, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return place
        return len(strata) - 1

    @property
    def rates(self) -> Mapping[str, float]:
        """By kind."""
        return self._rates

    def _name(self, stratum: str) -> str:
        return stratum if stratum in self._rates or len(self._rates) < MAX_STRATA - 1 else _OTHERS
