"""When a request may be sent a second time. Pure."""

from dataclasses import dataclass

MAX_ATTEMPTS = 2


@dataclass
class Attempts:
    """Owns one request's history: which replicas had it, and whether the client has seen anything of the answer."""

    tried: list[str]
    delivered: bool = False

    @classmethod
    def none(cls) -> "Attempts":
        """The history of a request that was not sent yet."""
        return cls(tried=[])

    def may_reissue(self) -> bool:
        """True when the lost replica's answer can be replaced unseen.

        Once a part of an answer is out, a second one would duplicate or contradict it (sampling is not repeatable
        across replicas); and a request that killed two replicas is not given a third.
        """
        return not self.delivered and len(self.tried) < MAX_ATTEMPTS
