"""Backend `kubernetes`: a grant is one JobSet (or a few) of agents, pinned to the grant's nodes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from reflux_placement.sources.labels import topology_from_labels
from reflux_placement.topology import NOTHING, Resources, Topology
from reflux_scheduler.backends.base import (
    AgentLaunch,
    Backend,
    BackendAway,
    Grant,
    GrantRefused,
    GrantStatus,
    NodeCondition,
)
from reflux_scheduler.backends.kubernetes import cluster, manifests, names, status
from reflux_scheduler.backends.kubernetes.api import ApiFailure, KubernetesApi, open_api
from reflux_scheduler.backends.kubernetes.mirror import Mirror
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)

Object = dict[str, Any]

_KINDS = {each.kind: each for each in (names.SECRET, names.JOBSET, names.LEADER_WORKER_SET, names.COMPUTE_DOMAIN)}
_TOLD_SECONDS = 600.0
_KEPT_ENDS = 4096
"""Ended grants that are remembered, so that a late request does not bring one back."""


class KubernetesBackend(Backend):
    """Follows nodes, workloads and pods by watches; an async context manager that owns connection and watches."""

    shared_agents = False

    def __init__(self, settings: KubernetesSettings, launch: AgentLaunch) -> None:
        self._settings = settings
        self._launch = launch
        self._workload = names.JOBSET if settings.workload == "jobset" else names.LEADER_WORKER_SET
        self._ended: dict[str, str] = {}
        """Grants that are never granted again, and why."""

        self._given_up: dict[str, float] = {}
        """Those among them that nobody asked to release, and since when."""
        self._cleanup = contextlib.AsyncExitStack()
        self._api: KubernetesApi
        self._nodes: Mirror
        self._mine: dict[str, Mirror]
        self._others: tuple[Mirror, ...] = ()
        """The pods of all namespaces, where they are followed."""

        self._foreign: tuple[int, dict[str, Resources]] = (0, {})
        """What others hold by node, as of a revision of their pods."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            api = self._api = await stack.enter_async_context(open_api(self._settings))
            self._nodes = Mirror(api, names.NODE.path(), self._settings.node_selector, cluster.keep_node)
            selector = names.selector(self._settings.stack)
            followed = {
                "workloads": (self._workload, status.keep_workload),
                "pods": (names.POD, status.keep_pod),
            }
            if self._settings.imex:
                followed["domains"] = (names.COMPUTE_DOMAIN, status.keep_workload)
            self._mine = {
                role: Mirror(api, kind.path(self._settings.namespace), selector, keep)
                for role, (kind, keep) in followed.items()
            }
            if self._settings.count_foreign:
                self._others = (Mirror(api, names.POD.path(), "", cluster.keep_foreign),)
            tasks = [asyncio.create_task(each.run()) for each in (self._nodes, *self._mine.values(), *self._others)]
            stack.push_async_callback(_end, tasks)
            self._cleanup = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def discover(self) -> Topology | None:
        await self._in_step(self._nodes)
        nodes = [cluster.labelled(each, self._settings) for each in self._nodes.objects.values()]
        return topology_from_labels(self._settings.cluster, nodes, self._settings.level_keys) if nodes else None

    async def conditions(self) -> Mapping[str, NodeCondition]:
        await self._in_step(self._nodes, *self._others)
        held = self._held_by_others()
        return {
            name: cluster.condition(each, self._settings.tolerations, held.get(name, NOTHING))
            for name, each in self._nodes.objects.items()
        }

    async def request(self, grant: Grant) -> None:
        if grant.id in self._given_up:
            return
        if grant.id in self._ended:
            raise GrantRefused(f"grant {grant.id} has ended: {self._ended[grant.id]}")
        await self._nodes.in_step(self._settings.call_seconds)
        labels = {name: node["metadata"].get("labels") or {} for name, node in self._nodes.objects.items()}
        gone = [share.node for share in grant.shares if share.node not in labels]
        if gone:
            # Not refused: a node that was there when the gang was placed may be gone now, and another one free.
            self._give_up(grant.id, f"the cluster has no node {', '.join(gone)}")
            return
        bundle = manifests.render(grant, self._launch, self._settings, labels)
        made: list[tuple[Object, bool]] = []
        try:
            for workload in bundle.workloads:
                made.append(await self._ensure(workload))
            await self._complete(grant.id, bundle, [thing for thing, _ in made])
        except (ApiFailure, GrantRefused) as failure:
            # What was there before this call may be running; it stays.
            if made and all(new for _, new in made):
                await self._discard(grant.id)
            raise GrantRefused(str(failure)) from None

    async def release(self, grant_id: str) -> None:
        self._note_end(grant_id, "it was released")
        await self._discard(grant_id)

    async def grants(self) -> Mapping[str, GrantStatus]:
        await self._in_step(*self._mine.values(), self._nodes)
        now = time.time()
        verdicts = [self._judge(seen, now) for seen in self._observed()]
        for verdict in verdicts:
            if verdict.newly_granted:
                await self._record_granted(verdict.status.id)
            elif verdict.expired:
                self._give_up(verdict.status.id, verdict.status.reason)
                await self._discard(verdict.status.id)
        return self._given_up_lately() | {verdict.status.id: verdict.status for verdict in verdicts}

    def _held_by_others(self) -> Mapping[str, Resources]:
        for mirror in self._others:
            if self._foreign[0] != mirror.revision:
                self._foreign = (mirror.revision, cluster.foreign(mirror.objects.values(), self._settings))
        return self._foreign[1]

    async def _in_step(self, *mirrors: Mirror) -> None:
        """The server answers now, and the copies follow it. Raises BackendAway."""
        try:
            await self._api.get("/version")
        except ApiFailure as failure:
            raise BackendAway(str(failure)) from None
        for mirror in mirrors:
            await mirror.in_step(self._settings.call_seconds)

    async def _complete(self, grant_id: str, bundle: manifests.Bundle, workloads: Sequence[Object]) -> None:
        """The workloads are there, suspended; makes what they own, then lets them start. Every step can be repeated."""
        for owner in workloads:
            if _grant_of(owner) != grant_id:
                raise GrantRefused(f"{owner['kind']} {owner['metadata']['name']} is there and is not of this grant")
            if owner["metadata"].get("deletionTimestamp"):
                raise GrantRefused(f"grant {grant_id} has ended: {owner['kind']} is being deleted")
        for dependent in bundle.dependents:
            await self._ensure(manifests.owned_by(dependent, workloads))
        for owner in workloads:
            if not self._settings.kueue_queue and (owner.get("spec") or {}).get("suspend"):
                owner = await self._api.patch(self._address(owner), {"spec": {"suspend": False}})
            self._mine["workloads"].put(owner)

    async def _ensure(self, manifest: Object) -> tuple[Object, bool]:
        """The object as the server has it, and whether it was made now."""
        where = _KINDS[manifest["kind"]].path(self._settings.namespace)
        try:
            thing, new = await self._api.create(where, manifest), True
        except ApiFailure as failure:
            if failure.status != 409:
                raise GrantRefused(f"{manifest['kind']} {manifest['metadata']['name']}: {failure}") from None
            thing, new = await self._api.get(f"{where}/{manifest['metadata']['name']}"), False
        return {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]} | thing, new

    def _address(self, thing: Object) -> str:
        return _KINDS[thing["kind"]].path(self._settings.namespace, thing["metadata"]["name"])

    async def _discard(self, grant_id: str) -> None:
        """Deletes all workloads of a grant, as the server and not the copy has them; what they own goes with them."""
        selector = f"{names.selector(self._settings.stack)},{names.GRANT_LABEL}={names.label_value(grant_id)}"
        where = self._workload.path(self._settings.namespace)
        try:
            found, _ = await self._api.list(where, selector)
            for each in found:
                await self._api.delete(f"{where}/{each['metadata']['name']}")
        except ApiFailure as failure:
            raise BackendAway(f"cannot release grant {grant_id}: {failure}") from None

    def _note_end(self, grant_id: str, why: str) -> None:
        self._ended.setdefault(grant_id, why)
        while len(self._ended) > _KEPT_ENDS:
            del self._ended[next(iter(self._ended))]

    def _give_up(self, grant_id: str, why: str) -> None:
        if grant_id not in self._ended:
            log.warning("giving up grant %s: %s", grant_id, why)
            self._note_end(grant_id, why)
            self._given_up[grant_id] = time.monotonic()

    def _given_up_lately(self) -> dict[str, GrantStatus]:
        """Told for some minutes after they are gone: otherwise nobody would learn why."""
        oldest = time.monotonic() - _TOLD_SECONDS
        self._given_up = {each: at for each, at in self._given_up.items() if at > oldest and each in self._ended}
        return {each: GrantStatus(each, "ended", reason=self._ended[each]) for each in self._given_up}

    def _observed(self) -> list[status.Observed]:
        """What the copies hold, grant by grant; only grants with a workload."""
        by_grant: dict[str, dict[str, list[Object]]] = {}
        for kind, mirror in self._mine.items():
            for each in mirror.objects.values():
                label = (each["metadata"].get("labels") or {}).get(names.GRANT_LABEL, "")
                by_grant.setdefault(label, {}).setdefault(kind, []).append(each)
        nodes = {name: cluster.condition(each, ()).state != "down" for name, each in self._nodes.objects.items()}
        found: list[status.Observed] = []
        for things in by_grant.values():
            workloads = sorted(things.get("workloads", []), key=lambda each: each["metadata"]["name"])
            grant_id = _grant_of(workloads[0]) if workloads else ""
            if grant_id:
                pods, domains = things.get("pods", []), things.get("domains", [])
                found.append(status.Observed(grant_id, workloads, pods, domains, nodes))
        return found

    def _judge(self, seen: status.Observed, now: float) -> status.Verdict:
        deadline = self._settings.start_deadline_seconds
        verdict = status.judge(seen, now, deadline, kueue=bool(self._settings.kueue_queue))
        why = self._ended.get(seen.grant_id)
        if why is None:
            return verdict
        # Its objects are still there: agents stop, or the deletion did not reach the server and is asked for again.
        told = replace(verdict.status, reason=why)
        return status.Verdict(told, expired=verdict.status.state != "ended")

    async def _record_granted(self, grant_id: str) -> None:
        """Writes down that a grant is complete, before anybody is told: later losses are losses."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for each in list(self._mine["workloads"].objects.values()):
            if _grant_of(each) != grant_id:
                continue
            body = {"metadata": {"annotations": {names.GRANTED_ANNOTATION: stamp}}}
            where = self._workload.path(self._settings.namespace, each["metadata"]["name"])
            try:
                self._mine["workloads"].put(await self._api.patch(where, body))
            except ApiFailure as failure:
                raise BackendAway(f"cannot record grant {grant_id}: {failure}") from None


def _grant_of(workload: Object) -> str:
    return (workload["metadata"].get("annotations") or {}).get(names.GRANT_ANNOTATION, "")


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
