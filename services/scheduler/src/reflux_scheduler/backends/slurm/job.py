"""Owns the translation of a grant into a Slurm job: components of equal nodes, script, environment, comment."""

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from reflux_placement.sources.hostlist import compress
from reflux_placement.sources.slurm_nodes import MIB, names_of
from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch, Grant, GrantRefused, NodeShare
from reflux_scheduler.backends.slurm.client import Component, JobOrder, Version
from reflux_scheduler.backends.slurm.settings import SlurmSettings

MAX_COMPONENTS = 128
"""Slurm's own bound for a heterogeneous job (MAX_HET_JOB_COMPS)."""

SEGMENTS_SINCE: Version = (23, 11)
"""First version with --segment."""

_GRANT = re.compile(r"[A-Za-z0-9_-]+")
_COMMENT = re.compile(r"nodes=(\S+) cpus=(\d+) mem=(\d+) gpus=(\d+)")
_FOREIGN = re.compile(r"SLURM|SBATCH_|SRUN_|SALLOC_|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL")
"""What a scheduler inherits when it runs inside a Slurm job itself; sbatch and srun would take it as options."""

_LAUNCHER = "reflux_scheduler.backends.slurm.launcher"


def job_order(
    grant: Grant, launch: AgentLaunch, settings: SlurmSettings, version: Version, labels: Mapping[str, str], *,
    block: bool, all_nodes: Sequence[str] = (),
) -> JobOrder:  # fmt: skip
    """The Slurm job of a grant.

    Args:
        grant: nodes and what each gives.
        launch: how an agent is started.
        settings: what every job asks.
        version: of the cluster.
        labels: leaf switch or base block of every node that has one.
        block: whether the cluster has a block topology.
        all_nodes: every node of the cluster, for pin "exclude".

    Raises:
        GrantRefused: no node, or more different shapes of nodes than Slurm has components.
    """
    if not _GRANT.fullmatch(grant.id):
        raise GrantRefused(f"{grant.id!r} cannot be part of a Slurm job's name")
    components = _components(grant.shares, settings.minimum_memory_mib)
    nodes = [share.node for share in grant.shares]
    pin = settings.pin if settings.pin != "auto" else "exclude" if block and settings.segment_size else "nodelist"
    if pin == "exclude" and len(components) > 1:
        pin = "nodelist"  # Every component would need its own list; blocks and shapes do not mix.
    leaves = {labels[node] for node in nodes} if all(node in labels for node in nodes) else set()
    return JobOrder(
        name=f"{settings.job_prefix}-{grant.id}",
        components=components,
        script=_script(grant.id, launch, settings, components),
        environment=_environment(grant.id, launch, settings),
        pin=pin,
        others=tuple(node for node in all_nodes if node not in set(nodes)) if pin == "exclude" else (),
        switches=len(leaves) if settings.switches and len(components) == 1 else 0,
        segment_size=settings.segment_size if version >= SEGMENTS_SINCE and pin == "exclude" else 0,
        output=f"{settings.log_dir}/{grant.id}.log" if settings.log_dir else "/dev/null",
    )


def grant_of(job_name: str) -> str:
    """The grant id in the name PREFIX-GRANT of a job, or PREFIX-GRANT.N of a component."""
    return job_name.partition("-")[2].partition(".")[0]


def comment(component: Component) -> str:
    """What a component asked for, kept with the job: after a restart the queue alone tells it."""
    size = f"cpus={component.cpus} mem={component.memory_mib} gpus={component.gpus}"
    return f"nodes={compress(component.nodes)} {size}"


def parse_comment(text: str) -> tuple[tuple[str, ...], Resources] | None:
    """Nodes and amount per node of a job's comment; None when somebody has replaced it."""
    match = _COMMENT.search(text)
    if match is None:
        return None
    cpus, memory_mib, gpus = (int(number) for number in match.groups()[1:])
    return names_of(match[1]), Resources(gpus=gpus, millicpus=cpus * 1000, memory_bytes=memory_mib * MIB)


def _components(shares: Sequence[NodeShare], minimum_memory_mib: int) -> tuple[Component, ...]:
    """One component per shape of node, in the order of first appearance. Slurm counts whole CPUs and MiB."""
    by_shape: dict[tuple[int, int, int], list[str]] = {}
    for share in shares:
        cpus = max(1, math.ceil(share.resources.millicpus / 1000))
        memory_mib = max(minimum_memory_mib, math.ceil(share.resources.memory_bytes / MIB))
        by_shape.setdefault((cpus, memory_mib, share.resources.gpus), []).append(share.node)
    if not by_shape:
        raise GrantRefused("a grant without nodes")
    if len(by_shape) > MAX_COMPONENTS:
        raise GrantRefused(f"its nodes have {len(by_shape)} different shapes, Slurm takes {MAX_COMPONENTS} in a job")
    return tuple(Component(tuple(nodes), *shape) for shape, nodes in by_shape.items())


def _script(grant_id: str, launch: AgentLaunch, settings: SlurmSettings, components: Sequence[Component]) -> str:
    """The batch script: one task per node, which survives the loss of other nodes and of single agents. The size of
    the step is written out: jobs that came through slurmrestd lack the variables that tell srun."""
    output = f"{settings.log_dir}/{grant_id}-%N.log" if settings.log_dir else "/dev/null"
    options = ["--overlap", "--export=ALL", "--no-kill", "--wait=0", "--kill-on-bad-exit=0", "--cpu-bind=none"]
    options += ["--mpi=none", "--input=none", f"--output={output}", "--ntasks-per-node=1", *settings.srun_options]
    argv = [sys.executable if launch.argv[0] == "python" else launch.argv[0], *launch.argv[1:]]
    agent = [sys.executable, "-I", "-m", _LAUNCHER, settings.agent_host, *argv]
    command: list[str] = []
    for index, component in enumerate(components):
        size = [f"--nodes={len(component.nodes)}", f"--ntasks={len(component.nodes)}"]
        group = [f"--het-group={index}"] if len(components) > 1 else []
        command += [":" if index else "srun", *options, *size, *group, *agent]
    return f"#!/bin/sh\n# All nodes of reflux grant {grant_id}.\nexec {shlex.join(command)}\n"


def _environment(grant_id: str, launch: AgentLaunch, settings: SlurmSettings) -> dict[str, str]:
    environment = {key: value for key, value in launch.environment.items() if not _FOREIGN.match(key)}
    if settings.conf:
        environment["SLURM_CONF"] = settings.conf
    return environment | {"REFLUX_AGENT_GRANT": grant_id}
