"""Settings of the places where jobs run outside this service."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BackendName = Literal["folder", "slurm", "ray", "http"]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class FolderSettings(BaseModel):
    """A folder that the service and its workers share."""

    model_config = _FROZEN

    folder: str = Field(min_length=1)
    """Absolute path, the same on every machine."""

    lost_seconds: float = Field(default=10.0, gt=0)
    """A worker that gives no sign of life for so long is dead; workers give one a second."""

    keep_hours: float = Field(default=24.0, gt=0)
    """How long results lie in the folder; equal work takes them up, also after a restart."""


class SlurmSettings(FolderSettings):
    """Array jobs of a Slurm cluster; requests and results go through the shared folder."""

    commands: str = ""
    """Folder of sbatch, squeue and scancel; empty looks at PATH."""

    conf: str = ""
    """slurm.conf (SLURM_CONF of the commands); empty is Slurm's own default."""

    python: str = ""
    """Interpreter with reflux-sandbox on the nodes; empty: the path of this one."""

    job_name: str = Field(default="reflux-verify", pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$")
    cpus: int = Field(default=1, ge=1)
    memory_mib: int = Field(default=4096, ge=64)
    time_limit_minutes: int = Field(default=0, ge=0)
    """Limit of one job; 0 takes the partition's default."""

    partition: str = ""
    account: str = ""
    most_running: int = Field(default=0, ge=0)
    """Tasks of one array that run at one time; 0 leaves it to Slurm."""

    gather_seconds: float = Field(default=0.5, ge=0)
    """Jobs that come within this time become one array."""

    poll_seconds: float = Field(default=2.0, gt=0)
    """How often the queue is looked at; one call for all jobs."""

    call_seconds: float = Field(default=10.0, gt=0)
    """Deadline of every command."""

    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch."""


class RaySettings(BaseModel):
    """Graders on an existing Ray cluster: actors that keep warm children on their nodes."""

    model_config = _FROZEN

    address: str = Field(min_length=1)
    """Address of the head, for example "10.0.0.1:6379", or "auto" on a node of the cluster."""

    actors: int = Field(default=1, ge=1, le=1024)
    """Graders, spread over the nodes."""

    cpus: float = Field(default=1.0, gt=0)
    """CPUs that each grader takes; it grades as many jobs at one time, at least one."""

    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of each grader, for example {"licence": 1}."""

    cache_folder: str = ""
    """Where tasks cache what they build; empty: a temporary folder of each grader."""

    open_seconds: float = Field(default=120.0, gt=0)
    """How long connecting to the cluster may take."""


class HttpSettings(BaseModel):
    """A server with the /verify contract of NeMo Gym's resources servers, as a verifier of its own."""

    model_config = _FROZEN

    url: str = Field(pattern=r"^https?://[^/\s]+(/\S*)?$")
    """Base address; /seed_session and /verify are below it."""

    version: str = Field(min_length=1)
    """Version of what the server grades; a new one makes the cache forget."""

    fidelity: Literal["rule", "surrogate", "full"] = "rule"
    cost_seconds: float = Field(default=1.0, gt=0)
    seed_session: bool = True
    """Call /seed_session before /verify and carry its cookies."""

    token: str = Field(default="", repr=False)
    """Bearer token of the server."""

    attempts: int = Field(default=3, ge=1, le=10)
    """Calls per answer when the server is away, busy (429) or fails (5xx)."""

    attempt_seconds: float = Field(default=60.0, gt=0)
    most_response_bytes: int = Field(default=1 << 20, ge=1024)
    parallel: int = Field(default=8, ge=1, le=256)
    """Answers of one job that are verified at one time."""


class RemoteSettings(BaseModel):
    """Which jobs run where; without a route they run in children of this service."""

    model_config = _FROZEN

    routes: dict[str, BackendName] = Field(default_factory=dict)
    """By verifier ("xrd-phase-id/full") or by fidelity ("full"); a verifier's own route wins."""

    folder: FolderSettings | None = None
    slurm: SlurmSettings | None = None
    ray: RaySettings | None = None
    http: dict[str, HttpSettings] = Field(default_factory=dict)
    """By name of the verifier ("my-env/verify"); such a verifier needs no route."""

    @model_validator(mode="after")
    def _known(self) -> "RemoteSettings":
        for name, backend in self.routes.items():
            if backend != "http" and getattr(self, backend) is None:
                raise ValueError(f"routes.{name} = {backend!r}, but there are no settings remote.{backend}")
            if backend == "http" and name not in self.http:
                raise ValueError(f"routes.{name} = 'http', but remote.http has no server for it")
        return self
