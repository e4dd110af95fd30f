"""Identity of a process on this host, and whether it still lives: proof against reused pids."""

import hashlib
import json
import os
import select
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from reflux_transfer.errors import PeerGone, RegionClosed, WrongHandle


@dataclass(frozen=True)
class ProcessIdentity:
    """A process as the kernel knows it. Equal fields mean the same process, not merely the same number."""

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str

    @classmethod
    def of_this_process(cls) -> Self:
        """The identity that a handle carries."""
        return cls(os.getpid(), _start_ticks(os.getpid()), _boot_id(), _pid_namespace())

    def on_this_host(self) -> bool:
        """Whether its pid means something here: same boot, same pid namespace."""
        return self.boot_id == _boot_id() and self.pid_namespace == _pid_namespace()

    @property
    def label(self) -> str:
        """A name for people; no two processes have the same."""
        mark = hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]
        return f"pid {self.pid} ({mark})"

    def to_json(self) -> dict[str, object]:
        """Plain values for a handle."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Inverse of `to_json`; raises `WrongHandle`."""
        if not isinstance(value, dict) or set(value) != set(cls.__dataclass_fields__):
            raise WrongHandle("the handle names no process")
        if not all(isinstance(value[key], int) for key in ("pid", "start_ticks")) or value["pid"] <= 0:
            raise WrongHandle("the handle names no process")
        return cls(**value)


class PeerWatch:
    """Watches one process through a pidfd; costs no call into it. Open it before the first read and close it after."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity = identity
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except OSError as error:
            raise PeerGone(f"process {identity.pid} is gone: {error.strerror}") from error
        try:
            # Read after the pidfd exists: from here on the number cannot change its owner unseen.
            same = _start_ticks(identity.pid) == identity.start_ticks
        except OSError:
            same = False
        if not same:
            self.close()
            raise PeerGone(f"process {identity.pid} is gone, its number belongs to another one now")

    def check(self) -> None:
        """Raises `PeerGone` when the process has exited, `RegionClosed` after `close`."""
        if self._pidfd < 0:
            raise RegionClosed("the remote region was released")
        poll = select.poll()  # one per call: a poll object refuses concurrent use
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
            raise PeerGone(f"process {self.identity.pid} has exited")

    def close(self) -> None:
        """Ends the watch."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _start_ticks(pid: int) -> int:
    # The name in field 2 may hold blanks and parentheses; the last ")" ends it and field 22 is the start time.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
