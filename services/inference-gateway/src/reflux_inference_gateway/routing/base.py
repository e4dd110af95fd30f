"""What a routing policy sees and must answer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One replica that may take the request, as the gateway knows it at this moment."""

    name: str
    """Resource name, `replicas/{replica}`."""

    inflight_tokens: int
    """Tokens that this gateway sent and that are not answered yet, counted from dispatch."""

    dispatched: int
    """Requests that this gateway ever sent there; breaks ties so that idle replicas share the work."""

    order: int
    """Order of registration; the last tie-break, so that a choice is a function of its input."""

    version: int = 0
    """Weight version that it serves, in optimizer steps."""

    capacity: int = 0
    """Sequences that it decodes at once; 0 when it did not say."""

    inflight_requests: int = 0
    """Requests that this gateway sent and that are not answered yet."""

    location: str = ""
    """Its place in the topology, outermost level first and levels parted by `/`; empty when unknown."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a policy may know of the request."""

    num_samples: int = 1
    """Samples of the one prompt, at least 1."""

    prompt: tuple[int, ...] | bytes = b""
    """Token ids, or the bytes of the prompt as the body has them; compared by prefix only."""

    num_prompt_tokens: int = 0
    """Length of the prompt in tokens; 0 when unknown."""

    max_tokens: int = 0
    """Upper bound of generated tokens per sample; 0 when unknown."""

    session: str = ""
    """Key of the trajectory or session; empty when the request is on its own."""

    run: str = ""
    """Run or tenant whose lengths are alike."""

    salt: str = ""
    """Weight version at the trajectory's start; what is known of caches under another salt is never used."""


@dataclass(frozen=True)
class Share:
    """The part of a group that one replica takes."""

    name: str
    num_samples: int


class RoutingPolicy(ABC):
    """Picks one replica per request, or several for a group.

    Contract: candidates are at least one, in order of registration; the names that come back are theirs. A policy
    reads no clock and does no I/O, and what it remembers between calls is its own and bounded (a counter, a tree). It
    may be asked again for the same request when the first choice turned out to be dead; that choice is then left out.
    """

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], ask: Ask) -> str:
        """Returns the name of the candidate that takes the whole request."""

    def split(self, candidates: Sequence[Candidate], ask: Ask) -> tuple[Share, ...]:
        """Returns who takes how many samples: each share at least 1, no name twice, `ask.num_samples` in sum."""
        return (Share(self.choose(candidates, ask), ask.num_samples),)

    def finished(self, name: str, ask: Ask, generated_tokens: Sequence[int]) -> None:  # noqa: B027
        """Learns the number of tokens of each sample that a replica completed; aborted samples are left out."""

    def forget(self, name: str) -> None:  # noqa: B027
        """A replica left or restarted: what was known of its cache is void."""
