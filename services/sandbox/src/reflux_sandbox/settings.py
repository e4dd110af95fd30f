"""Settings of the sandbox service."""

from typing import Any, Literal

from pydantic import Field

from reflux_kit.settings import ServiceSettings, prefix
from reflux_sandbox.dispatcher import DispatchLimits
from reflux_sandbox.isolation.base import ChildLimits
from reflux_sandbox.remote.settings import RemoteSettings
from reflux_sandbox.sessions.caps import SessionCaps
from reflux_sandbox.store import StoreLimits

_CANONICAL_CHILDREN = 4
"""Children that find canonical forms of answers, at one time (`keys`)."""


class SandboxSettings(ServiceSettings):
    """Isolation, concurrency and bounds; environment names start with REFLUX_SANDBOX_."""

    model_config = prefix("sandbox")

    listen: str = "127.0.0.1:7005"

    isolation: Literal["auto", "prefork", "bwrap", "gvisor", "process"] = "auto"
    """auto: prefork, or where it cannot run bwrap, then gvisor; never process (limits only, unsafe)."""

    identity: str = ""
    """Name of this service across restarts, for the leases on jobs; empty: host name and listen address."""

    idle_children: int = Field(default=3, ge=1, le=64)
    """Children that wait confined and warm."""

    rule_concurrency: int = Field(default=2, ge=1, le=64)
    """Children at work on rule verifications at one time."""

    surrogate_concurrency: int = Field(default=2, ge=1, le=64)
    full_concurrency: int = Field(default=1, ge=1, le=64)
    code_concurrency: int = Field(default=4, ge=1, le=64)
    """RunCode calls at one time; eight times as many may wait, further ones are refused."""

    batch_jobs: int = Field(default=64, ge=1, le=4096)
    """Jobs of one trusted verifier that one child may grade."""

    batch_seconds: float = Field(default=0.5, ge=0)
    """How long such a child takes new jobs, so that one fork (some ms) serves many; 0 ends it with its first job."""

    remote_concurrency: int = Field(default=256, ge=1, le=4096)
    """Jobs at work outside this machine at one time."""

    most_queued: int = Field(default=100_000, ge=1)
    """Jobs that may wait per fidelity."""

    hold_groups_above: int = Field(default=0, ge=0)
    """Waiting jobs above which the gateway holds new groups back, until half of them wait; 0 never does."""

    most_stored_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Payloads and answers of jobs that have not ended, in Redis; equal payloads are stored once."""

    priority_seconds: float = Field(default=60.0, gt=0)
    """Waiting time that one unit of priority is worth."""

    lease_seconds: float = Field(default=6.0, gt=0.1)
    most_attempts: int = Field(default=3, ge=1)
    keep_seconds: int = Field(default=3600, ge=1, le=31_536_000)
    """How long an ended job can be read."""

    cache_seconds: int = Field(default=86_400, ge=1, le=31_536_000)
    """How long grades answer equal work."""

    child_memory_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Ceiling of one child on top of the warm interpreter's memory."""

    child_processes: int = Field(default=64, ge=4)
    child_disk_bytes: int = Field(default=64 << 20, ge=1 << 20)
    output_bytes: int = Field(default=1 << 20, ge=1024)
    """Kept per stream of RunCode; the rest is read, thrown away and reported as truncated."""

    most_run_seconds: float = Field(default=600.0, gt=0)
    """Longest RunCode."""

    most_sessions: int = Field(default=8, ge=0, le=64)
    """Stateful sessions at one time; each keeps a child."""

    most_sessions_per_run: int = Field(default=4, ge=0, le=64)

    tasks: str = ""
    """Tasks whose verifiers are loaded, separated by commas; empty for all that are installed. Each has a warm process
    of its own: 80 to 350 MB, and some seconds of the start."""

    graders: str = "reflux_sandbox.isolation.graders"
    """Module with the class LoadedVerifiers that the warm parent loads; empty for none."""

    remote: RemoteSettings = RemoteSettings()
    """Jobs that run elsewhere, JSON in the environment: {"routes": {"full": "slurm"}, "slurm": {"folder": "/data"}}."""

    import_folders: tuple[str, ...] = ()
    """Further folders that children import from (a JSON list in the environment)."""

    def isolation_options(self, cache_folder: str) -> dict[str, Any]:
        """Arguments of an isolation mechanism."""
        graders = self.rule_concurrency + self.surrogate_concurrency + self.full_concurrency + _CANONICAL_CHILDREN
        limits = ChildLimits(
            memory_bytes=self.child_memory_bytes, processes=self.child_processes, disk_bytes=self.child_disk_bytes
        )
        return {
            "limits": limits,
            "idle_target": self.idle_children,
            "most_children": graders + self.code_concurrency + self.most_sessions + self.idle_children,
            "output_bytes": self.output_bytes,
            "graders": self.graders,
            "cache_folder": cache_folder,
            "import_folders": self.import_folders,
            "only_families": tuple(name.strip() for name in self.tasks.split(",") if name.strip()),
        }

    def session_caps(self) -> SessionCaps:
        """Sessions at one time."""
        return SessionCaps(most=self.most_sessions, most_per_run=self.most_sessions_per_run)

    def store_limits(self) -> StoreLimits:
        """Bounds of the job store."""
        return StoreLimits(
            most_queued=self.most_queued,
            most_bytes=self.most_stored_bytes,
            priority_seconds=self.priority_seconds,
            lease_seconds=self.lease_seconds,
            most_attempts=self.most_attempts,
            keep_seconds=self.keep_seconds,
            cache_seconds=self.cache_seconds,
        )

    def dispatch_limits(self) -> DispatchLimits:
        """What runs at one time."""
        return DispatchLimits(
            concurrency={
                "rule": self.rule_concurrency,
                "surrogate": self.surrogate_concurrency,
                "full": self.full_concurrency,
            },
            remote_concurrency=self.remote_concurrency,
            batch_jobs=self.batch_jobs,
            batch_seconds=self.batch_seconds,
            memory_bytes=self.child_memory_bytes,
        )
