"""Settings of the data plane (environment prefix REFLUX_TRANSFER_)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

BackendName = Literal["shm", "ucx", "tcp", "nixl"]
Transport = Literal["auto", "shm", "ucx", "tcp", "nixl"]
"""What a process offers its memory by; `auto` is what its probe chooses."""


class TransferSettings(BaseModel):
    """How backends are set up. Readers follow the owner's choice of a backend: the handle names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ucx_library: str = ""
    """Path of a libucp.so.0 to use instead of the wheel's, for instance a system UCX with RDMA."""

    ucx_transports: str = "cma,tcp,self"
    """UCX_TLS of our context.

    UCX's own shared memory transports are left out: UCX 1.21 emulates their reads by messages, which an owner that
    sleeps never answers.
    """

    ucx_net_devices: str = "lo"
    """UCX_NET_DEVICES of our context; `lo` keeps everything on this host.

    On a cluster name the NIC, for instance `mlx5_0:1`.
    """

    ucx_rma_rails: int = Field(default=2, ge=1, le=16)
    """UCX_MAX_RMA_RAILS of our context: over how many NICs one read may be spread."""

    ucx_rndv_rails: int = Field(default=2, ge=1, le=16)
    """UCX_MAX_RNDV_RAILS of our context: the same where UCX emulates reads by messages."""

    ucx_error_mode: Literal["auto", "peer"] = "auto"
    """`peer` makes UCX report every peer's death and switches cma off; `auto` reads peers of this host by cma."""

    ucx_segments: Literal["auto", "on", "off"] = "auto"
    """Whether memory for readers lies in shared segments (/dev/shm) where all peers are on this host.

    A read is a memcpy then. `auto` does so where their pages are huge (`mount -o remount,huge=always /dev/shm`): of
    small pages, scattered over a machine that has run for a while, it took longer than cma (docs/benchmarks.md).
    """

    ucx_connections_per_region: int = Field(default=4, ge=1, le=64)
    """How many reads of one remote region run at the same time; the others wait for their turn."""

    tcp_listen: str = Field(default="127.0.0.1:0", pattern=r"^[^:]+:\d+$")
    """Where the owner of `tcp` regions listens; port 0 takes a free one. On a cluster name the address of a NIC."""

    tcp_advertise: str = ""
    """The host that readers connect to, where it is not the one that is listened on."""

    tcp_connections_per_region: int = Field(default=4, ge=1, le=64)
    """How many reads of one remote region run at the same time; the others wait for their turn."""

    floor_gb_per_second: float | None = Field(default=None, gt=0)
    """A path slower than this is an error; empty takes the floor of the transport, see `probe.floors`."""


class TransferEnvironment(BaseSettings, TransferSettings):
    """The settings that the environment gives. A process reads them once, at its start, and hands them on."""

    model_config = SettingsConfigDict(env_prefix="REFLUX_TRANSFER_", extra="ignore", frozen=True)
