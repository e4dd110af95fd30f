"""When a request may be sent a second time. Pure."""

from dataclasses import dataclass

MAX_ATTEMPTS = 2


@dataclass
class Attempts:
    """Owns one request's history: which replicas had it, and whether the client has seen anything of the answer."""

    tried: list[str]
    delivered: bool = False
    pulling: bool = False
    """The replica was told to read another one's memory, which is never done twice for one request."""

    @classmethod
    def none(cls) -> "Attempts":
        """The history of a request that was not sent yet."""
        return cls(tried=[])

    def may_reissue(self) -> bool:
        """True when the lost replica's answer can be replaced unseen.

        Once a part of an answer is out, a second one would duplicate or contradict it (sampling is not repeatable
        across replicas); and a request that killed two replicas is not given a third.
        """
        return not (self.delivered or self.pulling) and len(self.tried) < MAX_ATTEMPTS

    def why_lost(self) -> str:
        """Why it may not be sent again, for an error's text."""
        if self.delivered:
            return "a part of the answer was out"
        return "its prompt was being handed over" if self.pulling else "this was the second replica"
