"""Settings of the data plane (environment prefix REFLUX_TRANSFER_)."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

BackendName = Literal["shm", "ucx"]


class TransferSettings(BaseSettings):
    """Which backend offers memory, and how UCX is set up.

    Readers follow the owner's choice: the handle names the backend.
    """

    model_config = SettingsConfigDict(env_prefix="REFLUX_TRANSFER_", extra="ignore", frozen=True)

    backend: Literal["auto", "shm", "ucx"] = "auto"
    """`auto` takes the first that passes its self-test, see `probe`."""

    ucx_library: str = ""
    """Path of a libucp.so.0 to use instead of the wheel's, for instance a system UCX with RDMA."""

    ucx_transports: str = "cma,tcp,self"
    """UCX_TLS of our context.

    UCX's own shared memory transports are left out: their segments outlive a killed process.
    """

    ucx_net_devices: str = "lo"
    """UCX_NET_DEVICES of our context; `lo` keeps everything on this host.

    On a cluster name the NIC, for instance `mlx5_0:1`.
    """

    ucx_connections_per_region: int = Field(default=4, ge=1, le=64)
    """How many reads of one remote region run at the same time; the others wait for their turn."""
