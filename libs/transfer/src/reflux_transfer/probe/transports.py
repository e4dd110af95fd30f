"""Which transports the loaded UCX offers, and whether any RDMA is really present."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from reflux_transfer.backends import ucp
from reflux_transfer.settings import TransferSettings

_RDMA = ("rc_", "dc_", "ud_", "srd", "gga_")


@dataclass(frozen=True)
class Transports:
    """Names as `ucx_info -d` gives them; it lists only those that have a device. Empty when it cannot be asked."""

    wanted: str
    present: frozenset[str]

    @property
    def rdma(self) -> tuple[str, ...]:
        """Those that are RDMA."""
        return tuple(sorted(name for name in self.present if name.startswith(_RDMA)))

    def __str__(self) -> str:
        listed = ",".join(sorted(self.present)) or "unknown"
        return f"{self.wanted} of {listed}; " + (f"RDMA: {','.join(self.rdma)}" if self.rdma else "no RDMA")


def ucx_transports(settings: TransferSettings) -> Transports:
    """Asks the `ucx_info` of the library that the settings name; takes some 30 ms."""
    library = Path(ucp.library_path(settings.ucx_library))
    beside = library.parent.parent / "bin" / "ucx_info"
    tool = str(beside) if beside.exists() else shutil.which("ucx_info")
    return Transports(settings.ucx_transports, _listed(tool, library) if tool else frozenset())


def _listed(tool: str, library: Path) -> frozenset[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "UCX_LOG_LEVEL": "fatal"}
    try:
        done = subprocess.run([tool, "-d"], env=environment, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(line.split()[-1] for line in done.stdout.splitlines() if "Transport:" in line)
