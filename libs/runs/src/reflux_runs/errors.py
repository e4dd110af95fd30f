"""Refusals of a run file: key, value and a value that would work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One thing that is wrong with a run file."""

    key: str
    """Dotted path, for example "rl.batch_size"."""
    value: object
    reason: str
    works: str
    """A value, or a change, that would be accepted."""

    def __str__(self) -> str:
        return f"{self.key} = {_shown(self.value)}: {self.reason}; {self.works} would work"


class ConfigError(ValueError):
    """A run file that cannot be run; `refusals` holds everything that was found, the message one line for each."""

    def __init__(self, refusals: tuple[Refusal, ...]) -> None:
        super().__init__("\n".join(map(str, refusals)))
        self.refusals = refusals


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
