"""A real Slurm on loopback for tests: munged, slurmctld, one slurmd per node, and slurmrestd when asked for.

Everything lies in one short folder below /tmp, because paths of unix sockets are limited to 107 bytes. All daemons are
children of a warden process (this file run as a program), which is a child subreaper: whatever they leave behind, job
steps included, becomes the warden's. It kills all of it when its stdin closes, so nothing outlives the test, however it
ends. Nodes have null character devices as GPUs: Slurm hands them out as on a real node.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
BEGIN_SECONDS = 30.0
_ATTEMPTS = 4
_REST_USER = 65534
"""nobody: slurmrestd refuses to run as root or as SlurmUser."""


class CannotRun(RuntimeError):
    """This machine cannot run a Slurm; the message says why."""


def why_not() -> str:
    """Why no Slurm can run here; empty when one can."""
    missing = [program for program in PROGRAMS if find(program) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): as root, deploy/setup.sh installs it"
    if os.geteuid() != 0:
        return "a Slurm of our own needs root (munged, slurmd and the GPU device files)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(f"{folder}/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except OSError as error:
            return f"device files for emulated GPUs cannot be made here ({error.strerror})"
    return ""


def find(program: str) -> str | None:
    """Where a program is; daemons are not on every PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/bin")


@dataclass(frozen=True)
class Layout:
    """Racks of equal nodes, named r<rack>n<node>; every rack is a leaf switch below one spine."""

    racks: tuple[int, ...] = (4, 4)
    """Nodes of each rack."""

    gpus: int = 4
    cpus: int = 8
    memory_mib: int = 16000
    slurmd_timeout_seconds: int = 4
    kill_wait_seconds: int = 2
    topology: bool = True

    @property
    def nodes(self) -> list[str]:
        """All node names."""
        return [f"r{rack}n{node}" for rack, size in enumerate(self.racks) for node in range(size)]


class SlurmCluster:
    """A running cluster; `slurm_cluster` makes one."""

    def __init__(self, folder: Path, layout: Layout, ports: list[int], rest: bool) -> None:
        self.folder = folder
        self.layout = layout
        self.nodes = layout.nodes
        self.conf = folder / "slurm.conf"
        self._control_port, self._rest_port, *node_ports = ports
        self._rest = rest
        self.rest_url = f"http://127.0.0.1:{self._rest_port}" if rest else ""
        _write_files(folder, layout, self._control_port, node_ports)
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: dict[str, int] = {}

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's own commands."""
        return {"PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin:/bin", "SLURM_CONF": str(self.conf)}

    def run(self, *argv: str, check: bool = True) -> str:
        """One of Slurm's commands; what it printed."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def start(self, name: str) -> None:
        """Starts a daemon: munged, slurmctld, slurmrestd or the name of a node."""
        assert self._warden.stdin is not None
        assert self._warden.stdout is not None
        order = {
            "argv": self._argv(name),
            "env": self._daemon_environment(name),
            "log": f"{self.folder}/log/{name}.out",
        }
        self._warden.stdin.write(json.dumps(order) + "\n")
        self._warden.stdin.flush()
        self.pids[name] = int(self._warden.stdout.readline())

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Signals a daemon and waits until it is gone."""
        pid = self.pids.pop(name)
        os.kill(pid, number)
        end = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{name} does not end")
            time.sleep(0.01)

    def begin(self) -> None:
        """Starts everything and waits until every node is idle."""
        self.start("munged")
        end = time.monotonic() + BEGIN_SECONDS
        while not (self.folder / "munge.sock").exists():
            self._check(end)
        for name in ("slurmctld", *self.nodes, *(["slurmrestd"] if self._rest else [])):
            self.start(name)
        self.wait_idle(end)
        while self._rest and not _listens(self._rest_port):
            self._check(end)

    def wait_idle(self, end: float | None = None) -> None:
        """Waits until every node is idle."""
        end = time.monotonic() + BEGIN_SECONDS if end is None else end
        while self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * len(self.nodes):
            self._check(end)

    def token(self) -> str:
        """A token for slurmrestd."""
        return self.run("scontrol", "token", "lifespan=3600").strip().partition("=")[2]

    def clear(self) -> None:
        """Ends all jobs, starts what was killed, makes every node idle again."""
        for name in ("slurmctld", *self.nodes):
            if name not in self.pids:
                self.start(name)
        user = str(os.geteuid())
        self.run("scancel", "--user", user, check=False)
        end = time.monotonic() + BEGIN_SECONDS
        while self.run("squeue", "-h", "-t", "all", "-o", "%T", check=False).split().count("COMPLETING"):
            self._check(end)
        if {line.strip() for line in self.run("sinfo", "-h", "-N", "-o", "%T").splitlines()} != {"idle"}:
            self.run("scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume", check=False)
        self.wait_idle(end)

    def end(self) -> None:
        """Kills everything that belongs to the cluster."""
        assert self._warden.stdin is not None
        with contextlib.suppress(OSError):
            self._warden.stdin.close()
        self._warden.wait(30)
        assert self._warden.stdout is not None
        self._warden.stdout.close()

    def _check(self, end: float) -> None:
        if time.monotonic() > end:
            logs = "\n".join(f"{path.name}: {_tail(path)}" for path in sorted((self.folder / "log").iterdir()))
            raise CannotRun(f"Slurm is not up after {BEGIN_SECONDS:.0f} s\n{logs}")
        if any(not Path(f"/proc/{pid}").exists() for pid in self.pids.values()):
            gone = [name for name, pid in self.pids.items() if not Path(f"/proc/{pid}").exists()]
            raise CannotRun(f"{gone[0]} ended: {_tail(self.folder / 'log' / f'{gone[0]}.out')}")
        time.sleep(0.03)

    def _daemon_environment(self, name: str) -> dict[str, str]:
        return {**self.environment, **({"SLURM_JWT": "daemon"} if name == "slurmrestd" else {})}

    def _argv(self, name: str) -> list[str]:
        folder = self.folder
        if name == "munged":
            files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
            files |= {"log-file": "log/munged.log", "seed-file": "munge.seed"}
            argv = ["munged", "-F", "--force", "--num-threads=2", *(f"--{k}={folder}/{v}" for k, v in files.items())]
        elif name == "slurmctld":
            argv = ["slurmctld", "-D", "-f", str(self.conf)]
        elif name == "slurmrestd":
            argv = ["setpriv", f"--reuid={_REST_USER}", f"--regid={_REST_USER}", "--clear-groups", "slurmrestd"]
            argv += ["-f", str(self.conf), "-a", "rest_auth/jwt", "-s", "openapi/v0.0.38"]
            argv += [f"127.0.0.1:{self._rest_port}"]
        else:
            argv = ["slurmd", "-D", "-f", str(self.conf), "-N", name]
        return [find(argv[0]) or argv[0], *argv[1:]]


@contextlib.contextmanager
def slurm_cluster(layout: Layout | None = None, rest: bool = False) -> Iterator[SlurmCluster]:
    """A cluster with idle nodes, gone after the block. Raises CannotRun; a port that was taken meanwhile is retried."""
    reason = why_not()
    if reason:
        raise CannotRun(reason)
    layout = layout or Layout()
    for attempt in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="rfx", dir="/tmp"))
        cluster = SlurmCluster(folder, layout, _free_ports(len(layout.nodes) + 2), rest)
        try:
            try:
                cluster.begin()
            except CannotRun:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            yield cluster
            return
        finally:
            cluster.end()
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path, layout: Layout, control_port: int, node_ports: list[int]) -> None:
    folder.chmod(0o755)
    for name in ("state", "spool", "log", "dev"):
        (folder / name).mkdir()
    for index in range(layout.gpus):
        os.mknod(folder / "dev" / f"nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name, size in (("munge.key", 1024), ("jwt.key", 32)):
        (folder / name).touch(0o600)
        (folder / name).write_bytes(os.urandom(size))
    host = socket.gethostname().partition(".")[0]
    lines = [line.format(R=folder, H=host, P=control_port, L=layout) for line in _CONF.strip().splitlines()]
    for name, port in zip(layout.nodes, node_ports, strict=True):
        gres = f" Gres=gpu:gb200:{layout.gpus}" if layout.gpus else ""
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={layout.cpus} "
            f"RealMemory={layout.memory_mib}{gres} Feature=rack{name[1 : name.index('n')]},nvl72"
        )
    lines.append("PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    if layout.topology:
        lines.append("TopologyPlugin=topology/tree")
        switches = [f"SwitchName=rack{rack} Nodes=r{rack}n[0-{size - 1}]" for rack, size in enumerate(layout.racks)]
        switches.append(f"SwitchName=spine Switches=rack[0-{len(layout.racks) - 1}]")
        (folder / "topology.conf").write_text("\n".join(switches) + "\n")
    if layout.gpus:
        device = f"{folder}/dev/nvidia[0-{layout.gpus - 1}]"
        gres = f"NodeName={','.join(layout.nodes)} Name=gpu Type=gb200 File={device} Flags=nvidia_gpu_env\n"
        (folder / "gres.conf").write_text(gres)
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


_CONF = """
ClusterName=emu
SlurmctldHost={H}(127.0.0.1)
SlurmctldPort={P}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={R}/munge.sock
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={R}/jwt.key
StateSaveLocation={R}/state
SlurmdSpoolDir={R}/spool/%n
SlurmctldPidFile={R}/slurmctld.pid
SlurmdPidFile={R}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdTimeout={L.slurmd_timeout_seconds}
MessageTimeout=3
KillWait={L.kill_wait_seconds}
TreeWidth=64
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""


def _children() -> list[int]:
    """Everything below this process, found by parent ids."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found[1:]


def _warden() -> None:
    """Starts what stdin orders, one JSON line each; at its end kills everything below itself."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C ends the test, and that closes stdin
    for line in sys.stdin:
        order = json.loads(line)
        with Path(order["log"]).open("ab") as output:
            child = subprocess.Popen(
                order["argv"], env=order["env"], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, restore_signals=True,
                preexec_fn=lambda: (signal.signal(signal.SIGCHLD, signal.SIG_DFL), libc.prctl(1, signal.SIGKILL)),
            )  # fmt: skip
        print(child.pid, flush=True)
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _warden()
