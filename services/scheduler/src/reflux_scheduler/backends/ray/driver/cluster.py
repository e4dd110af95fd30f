"""Owns what the driver asks of Ray itself: nodes, groups and actors, each in one call. Needs a connected process."""

import contextlib
import inspect
from collections.abc import Container
from dataclasses import asdict
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.ray.groups import (
    GroupFacts,
    Manifest,
    TopologyForm,
    group_arguments,
    topology_form,
)
from reflux_scheduler.backends.ray.host import AgentHost
from reflux_scheduler.backends.ray.nodes import RayNode, amounts, foreign, read_nodes


class Cluster:
    """The cluster that this process has joined."""

    def __init__(self, namespace: str, domain_key: str, name_key: str) -> None:
        self.domain_key = domain_key
        self._namespace = namespace
        self._name_key = name_key
        parameter = inspect.signature(placement_group).parameters.get("topology_strategy")
        self._form: TopologyForm = topology_form(parameter.annotation if parameter else None)
        self._host_class = ray.remote(num_cpus=0, max_restarts=0)(AgentHost)

    def nodes(self) -> dict[str, RayNode]:
        """Nodes by name."""
        return read_nodes(ray.nodes(), self._name_key, state.get_draining_nodes())

    def described(self, our_groups: Container[str]) -> list[dict[str, Any]]:
        """Nodes as JSON, with what others than these groups hold on them."""
        nodes = self.nodes()
        others = foreign(nodes.values(), available_resources_per_node(), self._held(our_groups))
        return [{**asdict(node), "foreign": asdict(others.get(node.name, NOTHING))} for node in nodes.values()]

    def alive(self) -> frozenset[str]:
        """Ids of the raylets that run."""
        return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])

    def hosts(self) -> frozenset[str]:
        """Names of the actors that live in our namespace."""
        return frozenset(ray.util.list_named_actors())

    def facts(self) -> dict[str, GroupFacts]:
        """Placement groups by name."""
        found: dict[str, GroupFacts] = {}
        for row in placement_group_table().values():
            facts = GroupFacts(row["state"], row.get("stats", {}).get("scheduling_state", ""))
            if row["name"] not in found or facts.state != "REMOVED":
                found[row["name"]] = facts
        return found

    def ensure_group(self, manifest: Manifest) -> None:
        """Asks for the group unless Ray has had one of that name."""
        if manifest.group not in self.facts():
            placement_group(**group_arguments(manifest, self.domain_key, self._form))

    def remove_group(self, manifest: Manifest) -> None:
        """Removes the group with all that runs in it; one that is not there is no error."""
        facts = self.facts().get(manifest.group)
        if facts is not None and facts.state != "REMOVED":
            # A release and the supervisor may tear the same grant down: the other one was faster.
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(manifest.group))

    def make_host(self, manifest: Manifest, index: int) -> Any:
        """The actor that holds the agent of a bundle; a new one when there is none."""
        place = PlacementGroupSchedulingStrategy(
            get_placement_group(manifest.group), placement_group_bundle_index=index
        )
        return self._host_class.options(
            name=manifest.host(index), get_if_exists=True, lifetime="detached", scheduling_strategy=place
        ).remote()

    def host(self, name: str) -> Any:
        """A living actor by name. Raises ValueError when it has just died."""
        return ray.get_actor(name, namespace=self._namespace)

    @staticmethod
    def _held(names: Container[str]) -> dict[str, Resources]:
        """What the bundles of these groups hold, by node id."""
        held: dict[str, Resources] = {}
        for row in placement_group_table().values():
            if row["name"] in names and row["state"] != "REMOVED":
                for index, node_id in row["bundles_to_node_id"].items():
                    held[node_id] = held.get(node_id, NOTHING) + amounts(row["bundles"][index])
        return held
