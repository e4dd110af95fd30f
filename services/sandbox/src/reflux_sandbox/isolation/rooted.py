"""Joins control groups, builds the read-only tree in a mount namespace of its own, and becomes another program there.

    python -I -m reflux_sandbox.isolation.rooted CONFIG_JSON PROGRAM [ARGUMENT ...]

Config: {"new_root": an empty folder, "folders": [shown besides Python's own], "groups": [open cgroup.procs]}.
"""

import json
import os
import signal
import sys

from reflux_sandbox.isolation import kernel
from reflux_sandbox.isolation.tree import Tree


def main() -> None:
    """Never returns unless a step fails."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    config = json.loads(sys.argv[1])
    for group in config["groups"]:
        os.write(group, b"0")
        os.close(group)
    kernel.unshare(kernel.CLONE_NEWNS)
    Tree(config["new_root"], tuple(config["folders"])).build()
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
