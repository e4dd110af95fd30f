"""Owns how a grant is written as a Ray placement group, and how what Ray says of the group is read. Pure, without Ray.

The scheduler has chosen the nodes, so every bundle is pinned to one by the label `ray.io/node-id`, which names one life
of a raylet: a node that died and came back under its old name is another node, and a bundle of the old one is never
rescheduled onto it (or, as in ray#62483, waits for ever for its dead domain without anybody noticing). The topology
strategy is laid on top when all nodes lie in one GPU domain: Ray then refuses a group that would leave it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args, get_origin

from reflux_placement.topology import Resources

TopologyForm = Literal["dict", "list", "none"]
"""How this version of Ray takes `topology_strategy`: one dict (2.57 and later), a list of dicts (an earlier revision),
or not at all (up to 2.56; seen on 2.49, 2.55 and 2.56)."""

GrantStage = Literal["asked", "launched", "ending", "ended", "released"]
"""asked: the group exists or is about to. launched: every agent has been started once. ending: being torn down, to
become `released`, or `ended` when it has a reason. The last two are tombstones: an id is never granted twice."""

NODE_ID_KEY = "ray.io/node-id"
_GROUP_PREFIX = "reflux-"
_BYTE = 1.0

_WAITING = {
    "NO_RESOURCES": "the chosen nodes have no free room: something that this scheduler did not place uses them",
    "INFEASIBLE": "the chosen nodes do not have this room, or do not lie in one GPU domain",
    "FAILED_TO_COMMIT_RESOURCES": "a chosen node went away while the group was being placed",
}


@dataclass(frozen=True, slots=True)
class Share:
    """One bundle: what one node gives. `ray_node_id` is the life of the raylet that was alive when it was asked for."""

    node: str
    ray_node_id: str
    resources: Mapping[str, float]
    domain: str = ""
    """Value of the node's GPU domain label; empty when it has none."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is kept of a grant in the cluster's own key-value store, so that a restarted scheduler finds it."""

    grant_id: str
    stage: GrantStage
    shares: tuple[Share, ...]
    reason: str = ""
    changed_at: float = 0.0
    """Unix time of the last change; tombstones are thrown away by their age."""

    lost: tuple[str, ...] = ()
    """Nodes that were gone when the grant ended."""

    @property
    def group(self) -> str:
        """Name of the placement group."""
        return f"{_GROUP_PREFIX}{self.grant_id}"

    @property
    def gone(self) -> bool:
        """Whether nothing of the grant is left in the cluster, or is about to be."""
        return self.stage in ("ending", "ended", "released")

    def host(self, index: int) -> str:
        """Name of the actor that holds the agent of a bundle."""
        return f"{self.group}/{index}/{self.shares[index].node}"

    def at(self, stage: GrantStage, now: float, reason: str = "", lost: Sequence[str] = ()) -> "Manifest":
        """The same grant at another stage."""
        return replace(self, stage=stage, changed_at=now, reason=reason or self.reason, lost=tuple(lost) or self.lost)

    def to_json(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()


def manifest_from_json(text: bytes) -> Manifest:
    """Reads what `Manifest.to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    raw: dict[str, Any] = json.loads(text)
    shares = tuple(Share(**share) for share in raw.pop("shares"))
    return Manifest(shares=shares, lost=tuple(raw.pop("lost", ())), **raw)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What Ray's table says of a placement group."""

    state: str
    """PENDING, PREPARED, CREATED, RESCHEDULING or REMOVED."""

    scheduling: str = ""
    """QUEUED, NO_RESOURCES, INFEASIBLE, FINISHED, ..."""


def ray_resources(share: Resources) -> dict[str, float]:
    """A node's share as resources of a bundle. Ray takes no empty bundle, so a share of nothing becomes one byte."""
    wanted = {"GPU": float(share.gpus), "CPU": share.millicpus / 1000, "memory": float(share.memory_bytes)}
    return {name: amount for name, amount in wanted.items() if amount > 0} or {"memory": _BYTE}


def topology_form(annotation: object) -> TopologyForm:
    """Which form of `topology_strategy` an annotation means; None stands for a function without that parameter."""
    if annotation is None:
        return "none"
    kinds = {get_origin(each) or each for each in (*get_args(annotation), annotation)}
    return "list" if list in kinds else "dict"


def group_arguments(manifest: Manifest, domain_key: str, form: TopologyForm) -> dict[str, Any]:
    """Keyword arguments of `ray.util.placement_group` that place the shares on exactly their nodes, all or none."""
    domains = {share.domain for share in manifest.shares}
    packed = len(domains) == 1 and "" not in domains
    selectors = [{NODE_ID_KEY: share.ray_node_id} for share in manifest.shares]
    arguments: dict[str, Any] = {
        "bundles": [dict(share.resources) for share in manifest.shares],
        "bundle_label_selector": selectors,
        "name": manifest.group,
        "lifetime": "detached",
    }
    if packed and form == "dict":
        arguments["topology_strategy"] = {domain_key: "STRICT_PACK"}
    elif packed and form == "list":
        arguments["topology_strategy"] = [{domain_key: "STRICT_PACK"}]
    elif packed:
        # Old Ray: the domain is one more label that each bundle's node has to carry.
        for selector, share in zip(selectors, manifest.shares, strict=True):
            selector[domain_key] = share.domain
    return arguments


def waiting_reason(facts: GroupFacts | None) -> str:
    """Why a group is not there yet, in a sentence that ends with Ray's own word; empty when there is nothing to say."""
    if facts is None or facts.state == "CREATED":
        return ""
    sentence = _WAITING.get(facts.scheduling)
    return f"{sentence} (Ray: {facts.scheduling})" if sentence else f"Ray: {facts.scheduling or facts.state}"


def dead_shares(manifest: Manifest, alive: frozenset[str]) -> list[str]:
    """Nodes whose raylet is gone; `alive` holds the ids of those that run."""
    return [share.node for share in manifest.shares if share.ray_node_id not in alive]


def status(
    manifest: Manifest,
    facts: GroupFacts | None,
    alive: frozenset[str],
    hosts: frozenset[str],
    ended_agents: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of a GrantStatus.

    Args:
        manifest: a grant that is not released.
        facts: its placement group, None when Ray has none.
        alive: ids of the raylets that run.
        hosts: names of the actors that live.
        ended_agents: by host name, how an agent ended that nobody told to.
    """
    native = f"ray placement group {manifest.group}"
    if manifest.stage == "asked":
        reason = "its agents are being started" if facts and facts.state == "CREATED" else waiting_reason(facts)
        return {"id": manifest.grant_id, "state": "waiting", "native": native, "reason": reason}
    if manifest.gone:
        return {
            "id": manifest.grant_id, "state": "ended", "native": native, "reason": manifest.reason,
            "lost_nodes": list(manifest.lost),
        }  # fmt: skip
    if facts is None or facts.state == "REMOVED":
        nodes = [share.node for share in manifest.shares]
        reason = "somebody else removed the placement group"
        return {"id": manifest.grant_id, "state": "ended", "native": native, "reason": reason, "lost_nodes": nodes}
    lost: dict[str, str] = dict.fromkeys(dead_shares(manifest, alive), "its raylet is gone")
    for index, share in enumerate(manifest.shares):
        host = manifest.host(index)
        if share.node not in lost and host in ended_agents:
            lost[share.node] = ended_agents[host]
        elif share.node not in lost and host not in hosts:
            lost[share.node] = "the process that held its agent is gone"
    reason = "; ".join(f"{node}: {why}" for node, why in lost.items())
    return {
        "id": manifest.grant_id, "state": "granted", "native": native, "reason": reason, "lost_nodes": list(lost),
    }  # fmt: skip
