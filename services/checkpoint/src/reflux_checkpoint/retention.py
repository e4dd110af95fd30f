"""Which committed checkpoints may go: a pure policy."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_checkpoint.manifest import CheckpointId


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """What is kept for ever; everything else may be deleted."""

    keep_last: int = 3
    """Newest intact checkpoints that are kept; at least 1."""

    keep_every_steps: int = 0
    """Checkpoints whose step is a multiple of this are kept, too; 0 keeps none."""


@dataclass(frozen=True)
class Held:
    """A committed checkpoint and whether all its objects are there and undamaged, as far as is known."""

    id: CheckpointId
    intact: bool


def expendable(newest_first: Sequence[Held], policy: RetentionPolicy) -> list[CheckpointId]:
    """Checkpoints of one run that may be deleted, oldest first.

    Only what lies behind `keep_last` intact ones is expendable, so damage never costs the last good state; a damaged
    one in front of them stays for a person to look at.
    """
    intact_seen = 0
    found: list[CheckpointId] = []
    for held in newest_first:
        permanent = held.intact and policy.keep_every_steps > 0 and held.id.step % policy.keep_every_steps == 0
        if intact_seen >= policy.keep_last and not permanent:
            found.append(held.id)
        intact_seen += held.intact
    return found[::-1]
