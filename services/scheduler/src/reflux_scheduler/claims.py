"""Owns the room that the policy keeps for pending jobs, stored before the actions that free it are carried out."""

import json
from collections.abc import Sequence

import numpy as np

from reflux_placement.gang import Assignment
from reflux_placement.policy.view import Claim
from reflux_placement.topology import Topology
from reflux_scheduler.store import Store


class Claims:
    """Claims of the last cycle. Nodes are stored by name, because a restart may number them anew."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store = store
        self._topology = topology
        self._claims: tuple[Claim, ...] = ()
        self._stored = "[]"

    async def load(self) -> None:
        """Takes over what the last scheduler kept; claims on nodes that are gone are dropped."""
        self._stored = await self._store.claims()
        self._claims = tuple(
            claim for each in json.loads(self._stored) if (claim := _decoded(each, self._topology)) is not None
        )

    def current(self, topology: Topology) -> tuple[Claim, ...]:
        """The claims, for a view of the same topology."""
        return self._claims if topology is self._topology else ()

    async def store(self, claims: Sequence[Claim]) -> None:
        """Replaces the claims. Only those that made jobs leave are stored: others are worked out anew."""
        evicting = [claim for claim in claims if claim.evicting]
        text = json.dumps([_encoded(claim, self._topology) for claim in evicting])
        if text != self._stored:
            await self._store.set_claims(text)
            self._stored = text
        self._claims = tuple(claims)


def _encoded(claim: Claim, topology: Topology) -> dict[str, object]:
    assignment = claim.assignment
    domain = topology.domains(assignment.level)[assignment.domain]
    return {
        "job": claim.job,
        "level": assignment.level,
        "domain": domain.label,
        "nodes": {
            role: [topology.nodes[index].name for index in ranks.tolist()] for role, ranks in assignment.nodes.items()
        },
        "after": list(claim.after),
    }


def _decoded(stored: dict[str, object], topology: Topology) -> Claim | None:
    nodes, level, label = stored["nodes"], str(stored["level"]), stored["domain"]
    after = stored["after"]
    assert isinstance(nodes, dict)
    assert isinstance(after, list)
    if level not in topology.levels:
        return None
    domain = next((domain.index for domain in topology.domains(level) if domain.label == label), None)
    if domain is None or any(name not in topology for names in nodes.values() for name in names):
        return None
    ranks = {
        str(role): np.array([topology.index_of(name) for name in names], dtype=np.int64)
        for role, names in nodes.items()
    }
    return Claim(
        job=str(stored["job"]),
        assignment=Assignment(level, domain, ranks),
        after=tuple(after),
        evicting=True,
        due_at=0.0,
    )
