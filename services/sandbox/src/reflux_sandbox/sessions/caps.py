"""How many sessions there may be."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SessionCaps:
    """Sessions at one time, in all and of one run."""

    most: int
    most_per_run: int
