"""`defrag_plan_found`: at 90 % load the gang of 4,608 GPUs cannot be placed; is there a plan of migration or a proof?

Two loads of the churn generator on 100,800 GPUs: gangs of up to a rack are bound to one rack, or only prefer one. For
every snapshot in which the gang does not fit, `defrag.plan` answers. A plan counts when it was executed here move by
move (every state recounted, every constraint of every moved job checked, the gang placed at the end), a proof when its
counting argument was recounted here from the holdings.

Asked twice: with the library's limits and all jobs movable, the hardest case for a proof (`defrag_plan_found`, bar 1:
the share of snapshots with a verified plan or a verified proof); and as the service asks (`defrag_as_shipped`): with
the limits of `PolicyConfig()`, and only a third of the jobs movable, those that have written a checkpoint within
MOVE_LOSS_SECONDS = 600 when each does so every half hour. There a proof says less: none of these jobs can make room.

The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from churn import BIG_GANG, BLOCKS, NODES_PER_RACK, RACKS_PER_BLOCK, Churn, cluster, live_jobs

from reflux_placement.gang import Assignment
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.check import broken
from reflux_placement.place.search import find_place
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.defrag import DEFAULT_LIMITS, Limits, Plan, plan
from reflux_placement.policy.defrag_bound import Proof
from reflux_placement.policy.makeroom import search_limits
from reflux_placement.policy.view import Live
from reflux_placement.room import Room

NODES = BLOCKS * RACKS_PER_BLOCK * NODES_PER_RACK


@dataclass(frozen=True, slots=True)
class Case:
    """A way to ask."""

    title: str
    limits: Limits
    movable_share: float


LIBRARY = Case("all movable, library's limits", DEFAULT_LIMITS, 1.0)
SHIPPED = Case("a third movable, limits as shipped", search_limits(PolicyConfig(), NODES), 1 / 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One snapshot: what came out, whether it was verified here, seconds of `plan`, nodes that change hands."""

    kind: str
    verified: bool
    seconds: float
    moved_nodes: int
    moved_jobs: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=10, help="per load")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.90], help="loads, as a share of the nodes")
    parser.add_argument("--warm-up", type=int, default=6000, help="departures before the first snapshot")
    options = parser.parse_args()
    outcomes: dict[Case, list[Outcome]] = {LIBRARY: [], SHIPPED: []}
    for level in options.levels:
        for soft in (False, True):
            found = _outcomes(level, soft, options.snapshots, options.warm_up)
            for case, answers in found.items():
                _report(f"{level:.0%}, racks {'preferred' if soft else 'required'}, {case.title}", answers)
                outcomes[case] += answers
    library, shipped = outcomes[LIBRARY], outcomes[SHIPPED]
    plans = [outcome for outcome in library if outcome.kind == "Plan"]
    figures = {
        "defrag_plan_found": _verified_share(library),
        "defrag_plans": len(plans),
        "defrag_proofs": sum(outcome.kind == "Proof" for outcome in library),
        "defrag_plan_s_max": round(max((outcome.seconds for outcome in library), default=0.0), 2),
        "defrag_moved_nodes_mean": round(float(np.mean([p.moved_nodes for p in plans])), 1) if plans else 0.0,
        "defrag_as_shipped": _verified_share(shipped),
        "defrag_as_shipped_plans": sum(outcome.kind == "Plan" for outcome in shipped),
        "defrag_as_shipped_s_max": round(max((outcome.seconds for outcome in shipped), default=0.0), 2),
    }
    print(json.dumps(figures))
    return 0


def _verified_share(outcomes: list[Outcome]) -> float:
    return round(float(np.mean([outcome.verified for outcome in outcomes])), 4) if outcomes else 0.0


def _outcomes(level: float, soft: bool, snapshots: int, warm_up: int) -> dict[Case, list[Outcome]]:
    """Every snapshot in which the gang does not fit, asked in both ways."""
    outcomes: dict[Case, list[Outcome]] = {LIBRARY: [], SHIPPED: []}
    for snapshot in Churn(cluster(), level, soft=soft).snapshots(snapshots, warm_up=warm_up):
        if isinstance(find_place(snapshot.room, BIG_GANG), Assignment):
            continue
        for case, answers in outcomes.items():
            answers.append(_ask(snapshot.room, case, told=not answers))
    return outcomes


def _ask(room: Room, case: Case, *, told: bool) -> Outcome:
    live = live_jobs(room, case.movable_share)
    begin = time.perf_counter()
    found = plan(room, live, BIG_GANG, case.limits)
    seconds = time.perf_counter() - begin
    if told:
        print(f"  first answer, {case.title}: {found.sentence}", flush=True)
    if isinstance(found, Plan):
        verified = all(live[job].movable for job, _ in found.moves) and plan_holds(room, found)
        return Outcome("Plan", verified, seconds, found.moved_members, len({job for job, _ in found.moves}))
    verified = isinstance(found, Proof) and proof_holds(room, live, found)
    return Outcome(type(found).__name__, verified, seconds, 0, 0)


def plan_holds(room: Room, found: Plan) -> bool:
    """Executes the moves in order on a copy; every state is recounted from all holdings."""
    after = room.copy()
    for job, assignment in found.moves:
        demand, before = after.holdings[job].demand, after.holdings[job].assignment
        counts = {role: len(ranks) for role, ranks in before.nodes.items()}
        after.release(job)
        if broken(room.topology, after.usable_NR(), demand, assignment, counts) is not None:
            return False
        after.take(job, demand, assignment)
        if (recounted_free(after) != after.free_NR).any() or after.free_NR.min() < 0:
            return False
    return broken(room.topology, after.usable_NR(), BIG_GANG, found.assignment) is None


def recounted_free(room: Room) -> np.ndarray:
    """Free amounts per node from the holdings alone."""
    free_NR = room.topology.capacity_NR.copy()
    for holding in room.holdings.values():
        for demand in holding.demand.roles:
            np.subtract.at(free_NR, holding.assignment.nodes[demand.role], np.array(demand.each.row))
    return free_NR


def proof_holds(room: Room, live: Mapping[str, Live], proof: Proof) -> bool:
    """Recounts the argument from the holdings: what racks hold with every movable job gone, and for a packing the sizes
    of the movable rack-bound pieces, the most by weight that a rack can hold (tried over all counts), and the sums."""
    bare = room.copy()
    bare.release_all([job for job in room.holdings if live[job].movable])
    racks = [slice(rack.start, rack.stop) for rack in room.topology.domains("rack")]
    if proof.kind == "capacity":
        copies_N = copies_per_node(bare.usable_NR(), proof.slot.each)
        return sum(int(copies_N[rack].sum()) // proof.slot.members for rack in racks) < proof.slot.needed
    weight = {piece.size: piece.weight for piece in proof.pieces} | {proof.slot_size: proof.slot_weight}
    pieces: Counter[int] = Counter()
    for job, holding in room.holdings.items():
        for demand in holding.demand.roles if live[job].movable else ():
            members = len(holding.assignment.nodes[demand.role])
            size = demand.segment_size or (members if demand.required_level == "rack" else 1)
            pieces[size * demand.each.gpus] += members // size
    if pieces != Counter({piece.size: piece.count for piece in proof.pieces if piece.count}):
        return False
    gpus = Counter(int(bare.free_NR[rack, 0].sum()) for rack in racks)
    hold = sum(heaviest(each, sorted(weight), weight) * count for each, count in gpus.items())
    load = sum(weight[size] * count for size, count in pieces.items())
    return proof.at_most < proof.slot.needed and load + proof.slot_weight * proof.slot.needed > hold


def heaviest(capacity: int, sizes: list[int], weight: dict[int, int]) -> int:
    """The largest weight of pieces that fit in a capacity, one size after another."""
    if not sizes:
        return 0
    size, rest = sizes[-1], sizes[:-1]
    return max(
        count * weight[size] + heaviest(capacity - count * size, rest, weight) for count in range(capacity // size + 1)
    )


def _report(title: str, outcomes: list[Outcome]) -> None:
    kinds = Counter(outcome.kind for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes] or [0.0]
    moved = [outcome.moved_nodes for outcome in outcomes if outcome.kind == "Plan"]
    nodes = f", nodes moved {min(moved)} / {np.mean(moved):.0f} / {max(moved)} (min / mean / max)" if moved else ""
    jobs = [outcome.moved_jobs for outcome in outcomes if outcome.kind == "Plan"]
    nodes += f", jobs {np.mean(jobs):.0f}" if jobs else ""
    verified = sum(outcome.verified for outcome in outcomes)
    print(
        f"{title}: {len(outcomes)} snapshots without room, {dict(kinds)}, verified {verified}{nodes}, "
        f"plan {np.median(seconds):.2f} s (max {max(seconds):.2f})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
