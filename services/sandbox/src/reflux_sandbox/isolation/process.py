"""The weak tier: a process per child with limits and, where possible, a call filter; files and users are shared."""

import signal
import sys

from reflux_sandbox.isolation import syscalls
from reflux_sandbox.isolation.base import Tier
from reflux_sandbox.isolation.plain import PlainConfig
from reflux_sandbox.isolation.spawned import Launch, SpawnedIsolation


class ProcessIsolation(SpawnedIsolation):
    """For machines without namespaces, by name only: verifiers to which answers are data, nothing a model wrote."""

    name = "process"
    tier = Tier.PROCESS
    stop_signal = signal.SIGTERM  # the supervisor kills what is below it: there is no namespace to do so

    @property
    def reasons(self) -> list[str]:
        filtered = "a seccomp filter refuses sockets and exec" if syscalls.supported() else "no seccomp filter"
        unsafe = "UNSAFE: children share files, user and process space with the service; only limits hold"
        return [unsafe, "no RunCode, no sessions", filtered, self.cells.reason, *self.notes]

    def check(self) -> None:
        """Runs everywhere."""

    def command(self, launch: Launch, config: PlainConfig) -> list[str]:
        module = "reflux_sandbox.isolation.plain"
        numbers = map(str, (launch.channel, launch.status, *launch.groups))
        return [sys.executable, "-I", "-m", module, config.to_json(), *numbers]
