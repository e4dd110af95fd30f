"""Errors of the service's core; they know nothing of gRPC, the servicer translates them."""


class UnknownJob(LookupError):
    """There is no job of that name."""


class UnknownAgent(LookupError):
    """No agent is registered for the node and grant: it must register first."""


class SupersededAgent(RuntimeError):
    """Another agent has taken over the node."""


class NotLeading(RuntimeError):
    """Another scheduler leads, or none does yet: nothing was changed."""

    def __init__(self, leader: str) -> None:
        where = f"the leader is at {leader}" if leader else "no leader is known yet"
        super().__init__(f"this scheduler does not lead; {where}")
        self.leader = leader


class ConfigurationError(ValueError):
    """A file that cannot be used: names the file, the key and the value, and says what would work."""

    def __init__(self, path: object, key: str, value: object, problem: str) -> None:
        super().__init__(f"{path}: {key} = {value!r}: {problem}")
        self.path = str(path)
        self.key = key
        self.value = value
        self.problem = problem
