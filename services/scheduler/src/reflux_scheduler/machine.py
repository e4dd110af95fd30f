"""What this machine has, and the toy rack that it is when nobody describes a cluster."""

import os
from pathlib import Path

from reflux_placement.topology import Node, Resources, Topology, build_topology


def this_machine() -> Resources:
    """CPUs that this process may use, GPUs as device files, physical memory."""
    gpus = sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Resources(gpus, len(os.sched_getaffinity(0)) * 1000, memory)


def toy_rack(machine: Resources | None = None) -> Topology:
    """This machine as a rack of one node named "local"; the same as configs/topologies/local.toml."""
    node = Node("local", machine or this_machine(), {"rack": "rack-1", "block": "block-1"})
    return build_topology("local", [node])
