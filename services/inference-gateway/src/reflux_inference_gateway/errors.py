"""What can go wrong with a request at the gateway; each error has a gRPC status, and an HTTP one in `http/`."""

from reflux_kit.errors import CapacityExhausted, NotFound, Unavailable, WrongState


class Overloaded(CapacityExhausted):
    """A bounded queue is full; the same request may be taken later."""

    reason = "OVERLOADED"


class UnknownModel(NotFound):
    """No replica registered this model since the gateway's start, and it has waited long enough for one."""

    reason = "UNKNOWN_MODEL"


class NoReplica(Unavailable):
    """No fitting replica took the request before its deadline; `state` is "paused", "syncing" (replicas serve different
    versions, the one asked for not yet), "full", "waiting" (there are some, but too old or lost) or "absent"."""

    reason = "NO_REPLICA"


class GenerationLost(Unavailable):
    """The replica died with a part of the answer out, or a second time; the whole group may be asked for again."""

    reason = "GENERATION_LOST"


class VersionGone(WrongState):
    """Every replica of the model serves newer weights than the one version that the request is bound to."""

    reason = "VERSION_GONE"
