"""Names of one run's keys; the hash tag keeps them in one slot, so that one script may touch them all."""

from dataclasses import dataclass

GROUP = b"rollout"
"""Consumer group of the rollout workers."""


@dataclass(frozen=True)
class RunKeys:
    """Keys of the run `run`."""

    run: str

    def _key(self, name: str) -> str:
        return f"{{{self.run}}}:{name}"

    @property
    def prompts(self) -> str:
        """Stream of open prompts."""
        return self._key("prompts")

    @property
    def groups(self) -> str:
        """Stream of graded groups that the trainer has not consumed."""
        return self._key("groups")

    @property
    def ledger(self) -> str:
        """Hash: prompt index -> issued, emitted, trained@step, filtered, unknown or dead."""
        return self._key("ledger")

    @property
    def claims(self) -> str:
        """Hash: prompt index -> fencing token of its present worker."""
        return self._key("claims")

    @property
    def counters(self) -> str:
        """Hash with the last fencing token."""
        return self._key("counters")

    @property
    def samples(self) -> str:
        """Hash: prompt index -> generated, not yet emitted samples."""
        return self._key("samples")

    @property
    def takes(self) -> str:
        """Hash: prompt index -> how often it was claimed."""
        return self._key("takes")

    @property
    def attempts(self) -> str:
        """Hash: prompt index -> failures by its own fault."""
        return self._key("attempts")

    @property
    def dead(self) -> str:
        """Stream of dead letters: index and error."""
        return self._key("dead")

    @property
    def workers(self) -> str:
        """Hash: worker -> heartbeats so far."""
        return self._key("workers")

    @property
    def cursor(self) -> str:
        """Hash: where the loop stands."""
        return self._key("cursor")

    @property
    def operations(self) -> str:
        """Hash: operation id -> logged learner operation."""
        return self._key("operations")

    @property
    def events(self) -> str:
        """Stream of state changes and progress."""
        return self._key("events")

    @property
    def record(self) -> str:
        """The run itself."""
        return self._key("run")

    @property
    def late_trained(self) -> str:
        """Hash: prompt index -> what was trained on provisional rewards, until its correction is."""
        return self._key("late_trained")

    @property
    def late_settled(self) -> str:
        """Hash: prompt index -> final rewards."""
        return self._key("late_settled")

    @property
    def late_token(self) -> str:
        """Where the stream of ladders goes on."""
        return self._key("late_token")

    def queue(self) -> list[str]:
        """Everything that may expire after the end of the run; record and events stay."""
        names = (
            "prompts groups ledger claims counters samples takes attempts dead workers cursor operations late_trained"
        )
        names += " late_settled late_token"
        return [self._key(name) for name in names.split()]
