"""How far a verifier has come, for those who wait for a long verdict. Costs a function call where nobody listens."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def _ignore(fraction: float) -> None:
    del fraction


listener: Callable[[float], None] = _ignore
"""Set by the process that runs verifiers; called in the thread that grades."""


def report(fraction: float) -> None:
    """Which part of the present job is done, 0 to 1."""
    listener(fraction)


def tracked(items: Sequence[T]) -> Iterator[T]:
    """The items in their order; each step tells how many are done."""
    for done, item in enumerate(items):
        report(done / len(items))
        yield item
