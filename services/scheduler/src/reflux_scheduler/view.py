"""How the policy sees jobs: asks of those that wait, and what those that hold room may do with it. Pure."""

from dataclasses import replace

from reflux_placement.gang import GangDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.makeroom import FEWEST_MOVES, search_limits
from reflux_placement.policy.view import Ask, Live, View
from reflux_scheduler.job import Job

_FEW, _SHORT_SECONDS = 8, 0.02


def ask_of(job: Job, demand: GangDemand) -> Ask:
    """What a job asks for."""
    spec = job.spec
    return Ask(
        job=job.name,
        number=job.number,
        gang=demand,
        submitted_at=job.queued_at or job.created_at,
        queue=spec.queue,
        priority=spec.priority,
        preemptible=not spec.protected,
        expected_seconds=spec.expected_seconds,
        min_run_seconds=spec.min_run_seconds,
    )


def live_of(job: Job, now: float, *, in_parts: bool, move_loss_seconds: float) -> Live:
    """A job that holds room.

    Args:
        job: it has a place.
        now: Unix time in seconds.
        in_parts: its room was asked for in grants, which go back as a whole.
        move_loss_seconds: for this long after a checkpoint it may be moved.
    """
    demand = job.spec.demand()
    if job.state == "PLACED" or now < job.grow_after:
        demand = _not_above_placed(job, demand)
    started = job.running_at or job.started_at or job.placed_at or now
    settled_here = job.state == "RUNNING" and job.ending is None and not job.retiring
    return Live(
        ask=replace(
            ask_of(job, demand),
            preemptible=not job.spec.protected and job.ending is None,
            # One that is ending will be gone as soon as its members are.
            expected_seconds=now - started + 1.0 if job.ending is not None else job.spec.expected_seconds,
        ),
        started_at=started,
        saved_at=max(started, job.saved_at),
        movable=settled_here and job.saved_at > started and now - job.saved_at <= move_loss_seconds,
        smaller=smaller_sizes(job) if in_parts else {},
    )


def takes_long(view: View, config: PolicyConfig, last_seconds: float) -> bool:
    """Whether a decision may take so long that others should go on meanwhile. Few pending jobs are decided at once
    while the cycle before was short, as handing over to a thread costs more; but on a large cluster the search for a
    migration may take a second.

    Args:
        view: what is decided about.
        config: how.
        last_seconds: how long the decision before this one took.
    """
    if len(view.pending) > _FEW or last_seconds >= _SHORT_SECONDS:
        return True
    is_large = search_limits(config, view.room.topology.num_nodes).attempts > FEWEST_MOVES
    waited = max((view.now - ask.submitted_at for ask in view.pending), default=0.0)
    return config.defragmentation and is_large and waited >= config.defragmentation_seconds


def smaller_sizes(job: Job) -> dict[str, tuple[int, ...]]:
    """The sizes that elastic roles may shrink to, ascending: those at which no grant is left in part. A grant that
    several roles share, as the first one does, is kept."""
    sizes: dict[str, tuple[int, ...]] = {}
    everywhere = job.placement.roles if job.placement is not None else ()
    for places in everywhere:
        demand = job.spec.role(places.role).demand()
        if demand.most == demand.least:
            continue
        last = {part: rank for rank, part in enumerate(places.parts)}
        shared = {part for other in everywhere if other is not places for part in other.parts}
        kept = max((last[part] for part in shared & last.keys()), default=-1)
        cuts: list[int] = []
        for rank, part in enumerate(places.parts):
            if kept < rank >= demand.least and rank % (demand.segment_size or 1) == 0:
                cuts.append(rank)
            kept = max(kept, last[part])
        sizes[places.role] = tuple(cuts)
    return sizes


def _not_above_placed(job: Job, demand: GangDemand) -> GangDemand:
    """Room that was asked for is not asked for anew because more is idle by now: a gang grows once it has started, and
    not soon after the cluster gave no room for that."""
    if job.placement is None or all(role.most == role.least for role in demand.roles):
        return demand
    have = {places.role: len(places.nodes) for places in job.placement.roles}
    roles = tuple(
        replace(role, count=have[role.role], min_count=min(role.least, have[role.role]), max_count=have[role.role])
        if role.role in have
        else role
        for role in demand.roles
    )
    return replace(demand, roles=roles)
