"""When a group is released, on which rung, and which groups are verified in full whatever they seem worth. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

from reflux_sandbox.jobs import REWARDS, Grade

Rung = Literal["rule", "surrogate", "full"]
RUNGS: tuple[Rung, ...] = get_args(Rung)


def released_on(wanted: Rung, finished: Sequence[Rung], *, trusted: bool, failed: bool) -> Rung | None:
    """The rung whose grades a group is released with now; None while it has to wait.

    A group that failed the rule check is released with the grades of that check at once: they are final. Otherwise the
    `wanted` rung releases as long as calibration trusts it, and the full one in any case.
    """
    if failed:
        return "rule"
    if "full" in finished:
        return "full"
    return wanted if trusted and wanted in finished else None


def all_failed(rule_grades: Sequence[Grade]) -> bool:
    """Whether no answer passes the rule check: each is graded, and invalid or without any reward."""
    return all(grade.outcome in REWARDS and grade.reward <= 0.0 for grade in rule_grades)


def is_audited(seed: int, run: str, group: str, share: float) -> bool:
    """Whether a group belongs to the random floor that is verified in full: decided by a hash, the same for ever.

    Whole groups, because the error of a group's advantages shows only when all its full rewards are known.
    """
    digest = hashlib.blake2b(f"{seed}\0{run}\0{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64
