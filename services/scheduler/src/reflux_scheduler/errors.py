"""Errors of the policy; they know nothing of gRPC, the servicer translates them."""

from pathlib import Path


class TopologyFileError(ValueError):
    """A topology file that cannot be used: names the file, the key and the value, and says what would work."""

    def __init__(self, path: Path | str, key: str, value: object, problem: str) -> None:
        super().__init__(f"{path}: {key} = {value!r}: {problem}")
        self.path = str(path)
        self.key = key
        self.value = value
        self.problem = problem


class InvalidTopology(ValueError):
    """A topology that breaks a rule of the tree, such as two nodes of one name."""

    def __init__(self, key: str, value: object, problem: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}")
        self.key = key
        self.value = value
        self.problem = problem


class InvalidJob(ValueError):
    """A job that can be run nowhere because its description contradicts itself."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem


class UnknownJob(LookupError):
    """There is no job of that name."""


class UnknownAgent(LookupError):
    """No agent is registered for the node: it must register first."""


class SupersededAgent(RuntimeError):
    """Another agent has taken over the node."""
