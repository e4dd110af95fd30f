"""Owns a synthetic load of reinforcement-learning jobs: gangs of roles that know each other, for clusters of racks.

No public trace of such jobs exists. Shapes follow the guides for NVL72 racks (segments of 16 of 18 nodes, the rest for
inference); shares and run times are assumptions, stated in `KINDS`. A member with GPUs takes a whole tray.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from reflux_placement.gang import GangDemand, Relation, RoleDemand
from reflux_placement.simulate.clusters import GIB
from reflux_placement.simulate.jobs import SimJob
from reflux_placement.simulate.openb import Workload
from reflux_placement.topology import NODE, Resources, Topology

SEGMENT = 16
_CPUS = 16_000
_SYNC_BYTES, _KV_BYTES, _STEP_BYTES = 1.3e12, 4e11, 5e12
"""Assumed bytes per step: weights to inference, KV blocks from prefill to decode, collectives inside the learner."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job. Run times are lognormal around `median_seconds`."""

    name: str
    share: float
    median_seconds: float
    sigma: float
    learner: int
    """Learner nodes; above a segment they come in segments of 16, each whole in a rack."""

    prefill: int = 0
    decode: int = 0
    rollout: int = 0
    part_gpus: int = 0
    """Above 0: one member with this many GPUs and nothing else (an experiment on part of a tray)."""


KINDS = (
    Kind("experiment", 0.40, 1_200, 1.2, 0, part_gpus=1),
    Kind("tray", 0.20, 3_600, 1.2, 1),
    Kind("small", 0.18, 7_200, 1.0, 4, prefill=1, decode=2, rollout=4),
    Kind("rack", 0.12, 14_400, 1.0, 8, prefill=2, decode=4, rollout=8),
    Kind("large", 0.07, 28_800, 0.8, 32, prefill=4, decode=8, rollout=16),
    Kind("huge", 0.03, 57_600, 0.6, 64, prefill=8, decode=16, rollout=32),
)


def gang_of(kind: Kind, tray: Resources, scale: int = 1) -> GangDemand:
    """The gang of a kind; `scale` multiplies the counts of jobs with several racks (large clusters, larger jobs)."""
    if kind.part_gpus:
        part = Resources(kind.part_gpus, _CPUS * kind.part_gpus, 64 * GIB * kind.part_gpus)
        return GangDemand(roles=(RoleDemand(role="learner", count=1, each=part),))
    factor = scale if kind.learner > SEGMENT else 1
    whole = Resources(tray.gpus, min(tray.millicpus, 4 * _CPUS), min(tray.memory_bytes, 512 * GIB))
    learner = kind.learner * factor
    segmented = learner > SEGMENT
    roles = [RoleDemand(
        role="learner", count=learner, each=whole, segment_size=SEGMENT if segmented else 0,
        preferred_level="" if segmented or learner == 1 else "rack", traffic=_STEP_BYTES,
    )]  # fmt: skip
    relations = []
    if kind.prefill:
        roles.append(RoleDemand(role="prefill", count=kind.prefill * factor, each=whole))
        roles.append(RoleDemand(role="decode", count=kind.decode * factor, each=whole))
        relations.append(Relation(role="decode", near="prefill", level="block", required=False, traffic=_KV_BYTES))
        relations.append(Relation(role="decode", near="learner", traffic=_SYNC_BYTES))
    if kind.rollout:
        roles.append(RoleDemand(role="rollout", count=kind.rollout * factor, each=Resources(0, 4_000, 16 * GIB)))
    return GangDemand(roles=tuple(roles), relations=tuple(relations))


def near_together(topology: Topology, gang: GangDemand) -> GangDemand:
    """A gang of several members with the tightest level above nodes that could hold all its GPUs as its preferred one:
    every policy that knows gangs of several roles is told (Kueue's podset groups, one allocation of Slurm)."""
    if sum(role.count for role in gang.roles) == 1:
        return gang
    gpus, whole = topology.capacity_NR[:, 0], gang.total().gpus
    for level in range(topology.tightness(NODE) + 1, len(topology.levels) - 1):
        if int(topology.sums(gpus, level).max()) >= whole:
            return replace(gang, preferred_level=topology.levels[level])
    return gang


def rl_workload(topology: Topology, *, jobs: int, load: float = 0.85, scale: int = 1, seed: int = 0) -> Workload:
    """Poisson arrivals of `KINDS` that offer `load` of the cluster's GPUs from the start on: the jobs that a running
    cluster would hold arrive at time 0 with what is left of their run times.

    Args:
        topology: with levels rack and block; its largest node is the tray.
        jobs: arrivals after time 0.
        load: offered GPU-seconds / the cluster's GPU-seconds.
        scale: factor for jobs of several racks.
        seed: of everything drawn.
    """
    rng = np.random.default_rng(seed)
    tray = topology.nodes[int(topology.capacity_NR[:, 0].argmax())].resources
    gangs = [near_together(topology, gang_of(kind, tray, scale)) for kind in KINDS]
    shares = np.array([kind.share for kind in KINDS])
    gpus = np.array([gang.total().gpus for gang in gangs], dtype=float)
    means = np.array([kind.median_seconds * math.exp(kind.sigma**2 / 2) for kind in KINDS])
    total = float(topology.capacity_NR[:, 0].sum())
    rate = load * total / float((shares * gpus * means).sum())
    drawn: list[SimJob] = _standing(gangs, shares, means, gpus, load * total, rng)
    at = np.cumsum(rng.exponential(1 / rate, jobs))
    for number, (kind, arrives_at) in enumerate(zip(rng.choice(len(KINDS), jobs, p=shares), at, strict=True)):
        seconds = KINDS[kind].median_seconds * math.exp(KINDS[kind].sigma * rng.standard_normal())
        drawn.append(_job(f"{KINDS[kind].name}-{number}", gangs[kind], float(arrives_at), seconds))
    told = ", ".join(f"{kind.share:.0%} {kind.name} ({int(g)} GPUs)" for kind, g in zip(KINDS, gpus, strict=True))
    return Workload(tuple(drawn), (
        f"SYNTHETIC jobs (seed {seed}): {told}; run times lognormal, arrivals Poisson at an offered load of {load:.2f}",
        f"{len(drawn) - jobs} of {len(drawn)} jobs arrive at time 0: those that a running cluster would hold",
    ))  # fmt: skip


def _standing(
    gangs: list[GangDemand], shares: np.ndarray, means: np.ndarray, gpus: np.ndarray, wanted: float,
    rng: np.random.Generator,
) -> list[SimJob]:  # fmt: skip
    """Jobs of a running cluster: kinds by share x run time (what is met at a random moment), with the rest of a
    length-biased run time (lognormal: the median shifts by sigma^2)."""
    odds = shares * means / float((shares * means).sum())
    standing: list[SimJob] = []
    held = 0.0
    while True:
        kind = int(rng.choice(len(KINDS), p=odds))
        if held + gpus[kind] > wanted:
            return standing
        held += float(gpus[kind])
        sigma = KINDS[kind].sigma
        whole = KINDS[kind].median_seconds * math.exp(sigma**2 + sigma * rng.standard_normal())
        job = _job(f"standing-{KINDS[kind].name}-{len(standing)}", gangs[kind], 0.0, whole)
        standing.append(replace(job, seconds=max(1.0, float(rng.random()) * whole)))


def _job(name: str, gang: GangDemand, arrives_at: float, seconds: float) -> SimJob:
    return SimJob(name=name, gang=gang, arrives_at=arrives_at, seconds=max(1.0, seconds), checkpoint_seconds=1800.0)
