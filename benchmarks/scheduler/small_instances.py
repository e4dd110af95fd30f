"""Small random clusters and gangs (<= 24 nodes, <= 6 racks, 1 to 4 roles) for which an exact solver proves the best."""

from dataclasses import replace

import numpy as np

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, Node, Resources, Topology, build_topology

MAX_NODES = 24
MAX_RACKS = 6
GPUS = 4
MILLICPUS = 64_000


def instance(seed: int) -> tuple[Room, GangDemand]:
    """Room and gang of a seed; not every gang fits."""
    rng = np.random.default_rng([20, seed])
    topology = _topology(rng)
    return _occupied(topology, rng), _gang(topology, rng)


def _topology(rng: np.random.Generator) -> Topology:
    racks = int(rng.integers(2, MAX_RACKS + 1))
    per_rack = int(rng.integers(2, MAX_NODES // racks + 1))
    per_block = int(rng.integers(1, racks + 1))
    nodes = [
        Node(
            f"n{rack}-{index}",
            Resources(gpus=GPUS, millicpus=MILLICPUS),
            {"rack": f"r{rack}", "block": f"b{rack // per_block}"},
        )
        for rack in range(racks)
        for index in range(per_rack)
    ]
    return build_topology("small", nodes)


def _occupied(topology: Topology, rng: np.random.Generator) -> Room:
    """Some nodes are full, some are partly used, and racks differ in how busy they are."""
    room = Room(topology)
    held: list[int] = []
    for rack in topology.domains("rack"):
        busy = float(rng.choice([0.0, 0.2, 0.5, 0.8]))
        for node in rack.indices:
            if rng.random() < busy:
                held += [node] * int(rng.choice([1, 2, 4, 4]))
    if held:
        other = RoleDemand(role="other", count=len(held), each=Resources(gpus=1, millicpus=8_000))
        room.take("other", GangDemand(roles=(other,)), Assignment(CLUSTER, 0, {"other": np.array(held)}))
    return room


def _gang(topology: Topology, rng: np.random.Generator) -> GangDemand:
    levels = [level for level in ("rack", "block") if level in topology.levels]
    roles = [_role(name, rng, levels) for name in ("learner", "prefill", "decode", "verifier")[: rng.integers(1, 5)]]
    relations: list[Relation] = []
    for one in range(1, len(roles)):
        near = int(rng.integers(0, one))
        kind = rng.random()
        if kind < 0.25 and roles[near].count and not roles[one].segment_size and not roles[near].segment_size:
            # The exact model knows hard relations in which every peer has equally many followers.
            factor = max(1, roles[one].count // roles[near].count)
            roles[one] = replace(roles[one], count=roles[near].count * factor)
            level = str(rng.choice(levels))
            relations.append(Relation(role=roles[one].role, near=roles[near].role, level=level, traffic=_bytes(rng)))
        elif kind < 0.8:
            relations.append(Relation(role=roles[one].role, near=roles[near].role, traffic=_bytes(rng)))
    required = str(rng.choice([CLUSTER, CLUSTER, CLUSTER, "block"]))
    return GangDemand(roles=tuple(roles), required_level=required, relations=tuple(relations))


def _role(name: str, rng: np.random.Generator, levels: list[str]) -> RoleDemand:
    gpus = int(rng.choice([4, 4, 2, 1])) if name != "verifier" else 0
    segment = int(rng.choice([0, 0, 2, 3])) if name == "learner" else 0
    count = max(1, segment) * int(rng.integers(1, 7 if segment < 2 else 4))
    bound = int(rng.choice([0, 0, 0, 0, 2]))
    spread = "rack" if bound else str(rng.choice(["", "", "", "", "rack"])) if name == "decode" else ""
    return RoleDemand(
        role=name,
        count=count,
        each=Resources(gpus=gpus, millicpus=int(rng.choice([4_000, 8_000, 16_000]))),
        required_level=str(rng.choice([CLUSTER, CLUSTER, CLUSTER, CLUSTER, *levels])),
        segment_size=segment,
        max_per_domain=bound,
        spread_level=spread,
        traffic=_bytes(rng),
    )


def _bytes(rng: np.random.Generator) -> float:
    """Nothing, or 0.1 to 100 GB a step."""
    return 0.0 if rng.random() < 0.25 else float(10 ** rng.uniform(8, 11))
