"""One child in an interpreter of its own: a supervisor and the worker below it, inside whatever a tier built around.

python -I -m reflux_sandbox.isolation.plain CONFIG_JSON CHANNEL_FD STATUS_FD [CGROUP_PROCS_FD ...]
python -I -m reflux_sandbox.isolation.plain CONFIG_JSON             (prints the verifiers as JSON)

A STATUS_FD of -1 sends the status as the last frame on the channel, which a worker with text of a model has closed.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from reflux_sandbox.isolation import frames, kernel, landlock, seccomp, tree
from reflux_sandbox.isolation.base import ChildLimits
from reflux_sandbox.isolation.confine import set_ceilings
from reflux_sandbox.isolation.supervisor import wait_for
from reflux_sandbox.isolation.worker import Grader, run_worker
from reflux_sandbox.isolation.zygote import ZygoteConfig, warm_up

_ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Everything such a child is told."""

    limits: ChildLimits
    warm_modules: tuple[str, ...]
    graders: str
    cache_folder: str
    import_folders: tuple[str, ...]
    only_families: tuple[str, ...] = ()
    around: Literal["nothing", "bwrap", "gvisor"] = "nothing"
    """Who built the walls: bwrap, gvisor (the work folders are left to mount), or nobody."""
    user_id: int = 0
    """Whom the worker becomes; 0 stays."""

    @classmethod
    def from_json(cls, text: str) -> "PlainConfig":
        values = json.loads(text)
        values["limits"] = ChildLimits(**values["limits"])
        for name in ("warm_modules", "import_folders", "only_families"):
            values[name] = tuple(values[name])
        return cls(**values)

    def without_verifiers(self) -> "PlainConfig":
        """The same for text that a model wrote."""
        return replace(self, graders="")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def warm(self) -> tuple[Grader, list[dict[str, Any]], list[str]]:
        """Loads the verifiers of every family into this one interpreter."""
        zygote = ZygoteConfig(
            limits=self.limits,
            warm_modules=self.warm_modules,
            graders=self.graders,
            cache_folder=self.cache_folder,
            import_folders=self.import_folders,
            only_families=self.only_families,
        )
        first = warm_up(zygote)
        graders: dict[str, Grader] = {}
        rows, notes = list(first.verifiers), list(first.notes)
        for family in first.families:
            warm = warm_up(zygote.for_family(family))
            graders[family] = warm.grade
            rows += warm.verifiers
            notes += warm.notes

        def grade(verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
            return graders.get(verifier.partition("/")[0], first.grade)(verifier, payload, answers)

        return grade, rows, notes


def kill_descendants() -> None:
    """Kills everything below this process, whatever session or group it moved to: orphans come to a subreaper."""
    for _ in range(_ROUNDS):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        for _ in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def _on_term(folder: str) -> Callable[[int, FrameType | None], None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    return handle


def _restrict(config: PlainConfig) -> bytes:
    """What a process can give up without rights. Without walls NPROC is left alone: it counts all of our user."""
    set_ceilings(config.limits, processes=config.around != "nothing")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if config.around == "bwrap":
        landlock.restrict(tree.WRITABLE, tree.WRITABLE_DEVICES)
    try:
        kernel.install_filter(seccomp.allow_list())
    except (OSError, KeyError):  # the kernel refuses, or we have no table for this machine
        if config.around != "nothing":
            raise
        return b""
    return seccomp.without_exec()


def _mount_work_folders(limits: ChildLimits, user_id: int) -> None:
    """As root of a gVisor kernel of our own; its tmpfs has a size and no count of files."""
    kept = tree.kept_below_writable()
    for folder in tree.WRITABLE:
        if any(path.startswith(folder + "/") for path in kept):
            continue  # this Python lives below it: writes go to the memory of the sandbox, without a cap of their own
        options = f"size={limits.disk_bytes},mode=700,uid={user_id},gid={user_id}"
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _become(user_id: int) -> None:
    """Only the worker does: its supervisor keeps another user, which it can neither signal nor look into."""
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def _work_folder(config: PlainConfig) -> str:
    if config.around == "nothing":
        return tempfile.mkdtemp(prefix="reflux-work-")
    if config.around == "gvisor":
        _mount_work_folders(config.limits, config.user_id)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # where the worker keeps our user it must not reach our descriptors
    return tree.WRITABLE[0]


def _one_piece_of_work(config: PlainConfig, channel: socket.socket, status: int, grade: Grader) -> None:
    folder = _work_folder(config)
    if config.around == "nothing":
        signal.signal(signal.SIGTERM, _on_term(folder))
    worker = os.fork()
    if worker == 0:
        try:
            if config.user_id:
                _become(config.user_id)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.chdir(folder)
            kernel.close_all_but({0, 1, 2, channel.fileno()})
            run_worker(channel, grade, _restrict(config))
        except BaseException as error:  # process boundary: a fork must never run the parent's code
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(70)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    words = wait_for(worker)
    if status >= 0:
        os.write(status, " ".join(map(str, words)).encode())
    else:
        frames.send(channel, {"ended": words})
    if config.around == "nothing":
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Warms up, then does one piece of work."""
    config = PlainConfig.from_json(sys.argv[1])
    stop = signal.SIGTERM if config.around == "nothing" else signal.SIGKILL  # process 1 ignores what it does not handle
    kernel.prctl(kernel.PR_SET_PDEATHSIG, stop)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    channel, status, *groups = map(int, sys.argv[2:]) if len(sys.argv) > 2 else (-1, -1)
    for group in groups:
        os.write(group, b"0")
        os.close(group)
    grade, rows, notes = config.warm()
    if channel < 0:
        print(json.dumps({"verifiers": rows, "notes": notes}))
        return
    if channel == 0:
        channel = os.dup(0)
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # the worker inherits its input: it must not be the channel
    _one_piece_of_work(config, socket.socket(fileno=channel), status, grade)


if __name__ == "__main__":
    main()
