"""Errors of the policy: each names the field, its value and what would work; they know nothing of gRPC."""


class InvalidTopology(ValueError):
    """A topology that breaks a rule of the tree, such as two nodes of one name."""

    def __init__(self, key: str, value: object, problem: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}")
        self.key = key
        self.value = value
        self.problem = problem


class InvalidGang(ValueError):
    """A gang whose description contradicts itself or names something that does not exist."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem


class UnknownLevel(InvalidGang):
    """A constraint at a level that the topology does not have; never treated as "no constraint"."""


class InvalidQueue(ValueError):
    """A tree of queues that contradicts itself or promises more than there is."""

    def __init__(self, key: str, value: object, problem: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}")
        self.key = key
        self.value = value
        self.problem = problem


class Occupied(ValueError):
    """Room that is asked for is not free, or its node does not exist any more."""
