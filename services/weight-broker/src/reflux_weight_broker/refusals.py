"""Why a publisher or a replica is turned away. Plain exceptions: the servicer gives them their gRPC codes."""


class Refusal(Exception):
    """Base; the text names what and the way out."""


class PublisherFenced(Refusal):
    """Another publisher has begun an epoch since: this one is stale and must not publish again."""


class VersionInProgress(Refusal):
    """Another publisher's version is under way."""


class VersionRegression(Refusal):
    """The version is lower than the committed one and the publisher did not say that it was restored."""


class LayoutMismatch(Refusal):
    """Publisher and replica have different tensors; the text names them."""


class UnknownLayout(Refusal):
    """Nobody has stored the layout of this hash, or it was forgotten: send it with PutLayout."""


class BaseMismatch(Refusal):
    """An adapter stands on top of an epoch that is not the committed one of its model."""


class UnknownReplica(Refusal):
    """Not registered, or registered by another incarnation: register again."""


class StaleEpoch(Refusal):
    """The acknowledged epoch is not under way for this replica."""
