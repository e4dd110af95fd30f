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


class UnknownReplica(Refusal):
    """Not registered, or registered by another incarnation: register again."""


class StaleEpoch(Refusal):
    """The acknowledged epoch is not under way for this replica."""
