"""Owns the life of grants inside the driver: asked -> launched, ending -> ended or released, and what tells of each.

Calls only record what is wanted and begin it; a supervisor thread carries it on, so that a driver that was killed
half-way and its successor do the same. Every step may be repeated: groups and actors have names, records have stages.
"""

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from reflux_placement.topology import Resources
from reflux_scheduler.backends.ray.driver.cluster import Cluster
from reflux_scheduler.backends.ray.driver.records import Records
from reflux_scheduler.backends.ray.groups import GroupFacts, Manifest, Share, dead_shares, ray_resources, status
from reflux_scheduler.backends.ray.nodes import lacking

log = logging.getLogger("reflux.ray")

_TICK_SECONDS = 0.2
_STOP_MARGIN_SECONDS = 3.0
_THREADS = 16
_REMOVED = "somebody else removed the placement group"
_HOST_GONE = "the process that held its agent is gone"


class Refused(ValueError):
    """The cluster will never give what is asked for."""


@dataclass(frozen=True, slots=True)
class AgentStart:
    """How the agent of a bundle is started and stopped."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    start_seconds: float
    stop_grace_seconds: float


class Grants:
    """All grants of one scheduler."""

    def __init__(self, cluster: Cluster, records: Records, agent: AgentStart) -> None:
        self._cluster = cluster
        self._records = records
        self._agent = agent
        self._lock = threading.RLock()
        """Held from reading a record to writing it."""

        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grant")
        self._busy: set[str] = set()
        self._waits: dict[Any, str] = {}
        """Host name per pending call that returns when the host's agent ends."""

        self._watched: set[str] = set()
        self._ended_agents: dict[str, str] = {}

    def supervise(self) -> None:
        """Carries grants on for ever, in a thread of its own."""
        threading.Thread(target=self._carry_on, name="supervisor", daemon=True).start()

    def request(self, grant_id: str, shares: Sequence[Mapping[str, Any]]) -> None:
        """Records the grant, then asks for its group; both happen at most once. Raises Refused."""
        with self._lock:
            known = self._records.get(grant_id)
            if known is None:
                known = self._new_manifest(grant_id, shares)
                self._records.put(known)
            if known.stage == "asked":
                self._cluster.ensure_group(known)

    def release(self, grant_id: str) -> None:
        """Tears the grant down and returns when its agents are gone."""
        with self._lock:
            manifest = self._records.get(grant_id)
            if manifest is None or manifest.stage == "released":
                return
            if manifest.stage == "ended":
                self._records.put(manifest.at("released", time.time()))
                return
            # Without a reason of its own an end is a release.
            manifest = replace(manifest, stage="ending", reason="", changed_at=time.time())
            self._records.put(manifest)
        self._tear_down(manifest)

    def nodes(self) -> list[dict[str, Any]]:
        """Every node that the cluster knows, as JSON."""
        return self._cluster.described({manifest.group for manifest in self._records.all(fresh=False)})

    def statuses(self) -> list[dict[str, Any]]:
        """Every grant that is not released, as fields of a GrantStatus."""
        manifests = [manifest for manifest in self._records.all() if manifest.stage != "released"]
        if not manifests:
            return []
        facts, alive, hosts = self._cluster.facts(), self._cluster.alive(), self._cluster.hosts()
        return [status(each, facts.get(each.group), alive, hosts, self._ended_agents) for each in manifests]

    def _new_manifest(self, grant_id: str, asked: Sequence[Mapping[str, Any]]) -> Manifest:
        nodes = self._cluster.nodes()
        shares: list[Share] = []
        dead: list[str] = []
        for each in asked:
            node = nodes.get(each["node"])
            if node is None:
                raise Refused(f"Ray knows no node {each['node']!r}; it knows {', '.join(sorted(nodes)) or 'none'}")
            wanted = Resources(**each["resources"])
            if node.state == "down":
                dead.append(node.name)
            elif short := lacking(wanted, node):
                raise Refused(f"node {node.name} has less than is asked for: {short}")
            domain = node.labels.get(self._cluster.domain_key, "")
            shares.append(Share(node.name, node.node_id, ray_resources(wanted), domain))
        manifest = Manifest(grant_id, "asked", tuple(shares), changed_at=time.time())
        if dead:
            return manifest.at("ended", time.time(), f"gone before it was asked for: {', '.join(dead)}", dead)
        return manifest

    def _carry_on(self) -> None:
        while True:
            try:
                self._step()
            except Exception:  # thread boundary: without this thread no grant would ever start
                log.exception("a step of the supervisor failed")
                time.sleep(_TICK_SECONDS)

    def _step(self) -> None:
        manifests = self._records.all(fresh=False)
        moving = [each for each in manifests if each.stage in ("asked", "ending") and each.grant_id not in self._busy]
        if moving:
            facts, alive = self._cluster.facts(), self._cluster.alive()
            for manifest in moving:
                self._move(manifest, facts.get(manifest.group), alive)
        self._watch([each for each in manifests if each.stage == "launched"])
        self._wait()

    def _move(self, manifest: Manifest, facts: GroupFacts | None, alive: frozenset[str]) -> None:
        dead = dead_shares(manifest, alive)
        if manifest.stage == "ending":
            self._begin(manifest, self._tear_down)
        elif dead:
            # Pinned to a raylet that is no more: Ray would wait for ever.
            reason = f"gone before its agents were started: {', '.join(dead)}"
            self._begin(manifest, lambda each: self._end(each, reason))
        elif facts is None:
            with self._lock:
                self._cluster.ensure_group(manifest)
        elif facts.state == "REMOVED":
            self._begin(manifest, lambda each: self._end(each, _REMOVED))
        elif facts.state == "CREATED":
            self._begin(manifest, self._launch)

    def _begin(self, manifest: Manifest, work: Callable[[Manifest], None]) -> None:
        self._busy.add(manifest.grant_id)

        def run() -> None:
            try:
                work(manifest)
            except Exception:  # thread boundary: the next step tries again
                log.exception("grant %s", manifest.grant_id)
                time.sleep(_TICK_SECONDS)
            finally:
                self._busy.discard(manifest.grant_id)

        self._pool.submit(run)

    def _launch(self, manifest: Manifest) -> None:
        """Starts every agent; a grant whose agents cannot all be started is torn down."""
        addresses = {node.node_id: node.address for node in self._cluster.nodes().values()}
        starts: list[Any] = []
        for index, share in enumerate(manifest.shares):
            host = self._cluster.make_host(manifest, index)
            environment = self._environment(manifest, share, addresses.get(share.ray_node_id, ""))
            starts.append(host.start.remote(self._agent.argv, environment, f"{manifest.grant_id}-{share.node}"))
        ray.wait(starts, num_returns=len(starts), timeout=self._agent.start_seconds)
        problems = [
            f"{share.node}: {problem}"
            for share, start in zip(manifest.shares, starts, strict=True)
            if (problem := self._problem(start))
        ]
        if problems:
            self._end(manifest, f"agents cannot be started: {'; '.join(problems)}")
            return
        with self._lock:
            now = self._records.get(manifest.grant_id)
            if now is not None and now.stage == "asked":
                self._records.put(manifest.at("launched", time.time()))

    def _problem(self, start: Any) -> str:
        try:
            ray.get(start, timeout=0)
        except GetTimeoutError:
            return f"not started within {self._agent.start_seconds:g} s"
        except RayError as error:
            return " ".join(str(getattr(error, "cause", None) or error).split())[-300:]
        return ""

    def _environment(self, manifest: Manifest, share: Share, address: str) -> dict[str, str]:
        own = {"REFLUX_AGENT_NODE": share.node, "REFLUX_AGENT_GRANT": manifest.grant_id}
        if not address or ipaddress.ip_address(address).is_loopback:
            return {**self._agent.environment, **own}
        # The scheduler's own name for its machine must not become the agent's.
        host = f"[{address}]" if ":" in address else address
        return {"REFLUX_AGENT_LISTEN": f"{host}:0", **self._agent.environment, **own, "REFLUX_ADVERTISE_HOST": host}

    def _end(self, manifest: Manifest, reason: str) -> None:
        lost = dead_shares(manifest, self._cluster.alive())
        with self._lock:
            now = self._records.get(manifest.grant_id)
            if now is None or now.stage != "asked":
                return
            ending = manifest.at("ending", time.time(), reason, lost)
            self._records.put(ending)
        self._tear_down(ending)

    def _tear_down(self, manifest: Manifest) -> None:
        """Stops the agents, then removes actors and group; Ray kills what the group still holds."""
        living, alive = self._cluster.hosts(), self._cluster.alive()
        hosts: list[Any] = []
        for index, share in enumerate(manifest.shares):
            if share.ray_node_id in alive and manifest.host(index) in living:
                with contextlib.suppress(ValueError):
                    hosts.append(self._cluster.host(manifest.host(index)))
        if hosts:
            grace = self._agent.stop_grace_seconds
            stops = [host.stop.remote(grace) for host in hosts]
            ray.wait(stops, num_returns=len(stops), timeout=grace + _STOP_MARGIN_SECONDS)
        for host in hosts:
            ray.kill(host)
        self._cluster.remove_group(manifest)
        with self._lock:
            now = self._records.get(manifest.grant_id)
            if now is not None and now.stage == "ending":
                self._records.put(now.at("ended" if now.reason else "released", time.time()))

    def _watch(self, launched: Sequence[Manifest]) -> None:
        """Waits for the end of agents that nobody ends."""
        wanted = {each.host(index) for each in launched for index in range(len(each.shares))}
        self._ended_agents = {host: why for host, why in self._ended_agents.items() if host in wanted}
        fresh = wanted - self._watched
        self._watched = wanted
        for name in (fresh & self._cluster.hosts()) if fresh else ():
            with contextlib.suppress(ValueError):
                self._waits[self._cluster.host(name).ended.remote()] = name

    def _wait(self) -> None:
        """One tick, in which ends of agents are noticed."""
        if not self._waits:
            time.sleep(_TICK_SECONDS)
            return
        done, _ = ray.wait(list(self._waits), num_returns=len(self._waits), timeout=_TICK_SECONDS)
        for each in done:
            host = self._waits.pop(each)
            try:
                self._ended_agents[host] = ray.get(each)
            except RayError:
                self._ended_agents.setdefault(host, _HOST_GONE)
