"""Owns the settings of the Slurm backend."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reflux_placement.topology import DEFAULT_LEVELS


class SlurmSettings(BaseModel):
    """How to reach a Slurm cluster and what every job asks there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commands: str = ""
    """Folder of sbatch, squeue, scancel and scontrol; empty looks at PATH."""

    conf: str = ""
    """slurm.conf (SLURM_CONF of the commands); empty is Slurm's own default."""

    rest_url: str = ""
    """slurmrestd, for example "http://slurm:6820"; empty uses the commands."""

    rest_version: str = Field(default="v0.0.38", pattern=r"^v0\.0\.\d+$")
    """OpenAPI version that this slurmrestd serves, v0.0.38 or newer."""

    rest_token: str = Field(default="", repr=False)
    """JWT for slurmrestd (`scontrol token`)."""

    rest_token_file: str = ""
    """File with the JWT, read at every call: tokens expire, something renews the file."""

    user: str = ""
    """User that owns the jobs; empty is the user of this process."""

    job_prefix: str = Field(default="reflux", pattern=r"^[A-Za-z][A-Za-z0-9]{0,31}$")
    """First word of the names of our jobs. A scheduler ends jobs of its prefix and user that it does not know: two
    schedulers with one user take two prefixes."""

    partition: str = ""
    """Only nodes of this partition are used; empty uses the default partition and all nodes."""

    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    """Features that every node must have, in Slurm's syntax."""

    time_limit_minutes: int = Field(default=0, ge=0)
    """Limit of every job; 0 takes the partition's default. Reaching it ends the part of the job that it holds."""

    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch; not with `rest_url`."""

    srun_options: tuple[str, ...] = ()
    """Further options of the srun that starts the agents, such as "--container-image=..."."""

    pin: Literal["auto", "nodelist", "exclude"] = "auto"
    """How exactly these nodes are asked for. Block topologies do not take --nodelist together with segments: "exclude"
    names all other nodes instead. "auto" looks at the cluster's topology."""

    switches: bool = False
    """Ask --switches for the number of leaf switches that the nodes hang on: Slurm then checks the placement too."""

    segment_size: int = Field(default=0, ge=0)
    """Nodes per segment of a block topology (--segment, since Slurm 23.11) where it divides the part; 0 asks none."""

    topology_file: str = ""
    """topology.conf or topology.yaml to read instead of asking the cluster."""

    topology_name: str = ""
    """Which topology of a topology.yaml; empty is the cluster's default one."""

    levels: tuple[str, ...] = DEFAULT_LEVELS
    """Names for the levels of switches or blocks, tightest first."""

    foreign_jobs: Literal["avoid", "share"] = "avoid"
    """Nodes that jobs of others are on: "avoid" gives them no new work, "share" uses what those leave."""

    minimum_memory_mib: int = Field(default=256, ge=1)
    """Least memory that is asked on a node; agent and members live in it."""

    agent_host: Literal["node", "loopback"] = "node"
    """Whether agents listen on all interfaces and tell the node's name, or stay on loopback (one-host clusters)."""

    work_dir: str = "/tmp"
    """Working folder of the jobs on the nodes."""

    log_dir: str = ""
    """Folder for the agents' own output, GRANT-NODE.log; it exists on every node, or the jobs fail. Empty drops it."""

    call_seconds: float = Field(default=5.0, gt=0)
    """Deadline of every call to Slurm; its commands alone would try for some 9 s to reach a controller that is away."""
