"""The API server that tests of the Kubernetes backend talk to: kmock's emulator with what a client of watches needs.

kmock stores objects and routes requests. Added here: resource versions, uids and creation times, label selectors,
pages, watches that begin at a version and answer 410 Gone when it was compacted, finalizers of foreground deletion.
"""

import asyncio
import copy
import itertools
import time
import uuid
from collections import defaultdict

import kmock
from kmock import KubernetesError, action

NAMESPACE = "reflux"
KINDS = {
    ("", "v1", "nodes"): "Node",
    ("", "v1", "pods"): "Pod",
    ("", "v1", "secrets"): "Secret",
    ("batch", "v1", "jobs"): "Job",
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"): "JobSet",
    ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"): "LeaderWorkerSet",
    ("resource.nvidia.com", "v1beta1", "computedomains"): "ComputeDomain",
}
WITH_FINALIZER = {"jobsets": "foregroundDeletion", "leaderworkersets": "foregroundDeletion", "pods": "test/kubelet"}
_RIGHTS = {
    "LIST": "list",
    "WATCH": "watch",
    "FETCH": "get",
    "CREATE": "create",
    "UPDATE": "patch",
    "DELETE": "delete",
}
_VERBS = {"get", "list", "watch", "create", "patch", "delete", "update"}


def stamp(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class _Bus:
    """Takes kmock's events of one resource into the log of all."""

    def __init__(self, api: "Api", resource) -> None:
        self._api = api
        self._resource = resource

    async def put(self, event) -> None:
        await self._api.note(self._resource, event)


class _Buses(defaultdict):
    def __init__(self, api: "Api") -> None:
        super().__init__()
        self._api = api

    def __missing__(self, resource):
        return self.setdefault(resource, _Bus(self._api, resource))


class Api(kmock.KubernetesEmulator):
    """An API server in memory; `away`, `silent` and `compact` are its faults."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._buses = _Buses(self)
        self._versions = itertools.count(1001)
        self._last = 1000
        self._log: list[tuple[int, object, dict]] = []
        self._compacted = 0
        self._news = asyncio.Condition()
        self.page = 500
        self.calls: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self.rights: set[tuple[str, str, str, str]] = set()
        """(verb, group, plural, namespace) of all that clients did, controllers and kubelets not counted."""

        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        """(HTTP method, plural) -> (status, message) of calls that are refused."""

        self.silent = asyncio.Event()
        self.stopping = False
        self.lists = 0
        for (group, version, plural), kind in KINDS.items():
            self.resources[kmock.resource(group, version, plural)] = kmock.ResourceInfo(
                kind=kind, singular=kind.lower(), namespaced=kind != "Node", verbs=_VERBS
            )

    async def _handle(self, request):
        while self.silent.is_set():
            await asyncio.sleep(0.02)
        del self._requests[:-1]  # kmock searches all past requests for every filter of every request
        self.authorizations.append(request.headers.get("Authorization", ""))
        if request.resource is not None:
            plural = request.resource.plural
            self.calls.append((str(request.method.value), plural))
            if "kmock" not in request.headers.get("User-Agent", ""):
                scope = (request.resource.group, plural, request.namespace or "")
                self.rights.add((_RIGHTS[request.action.value], *scope))
            refusal = self.refusals.get((str(request.method.value), plural))
            if refusal is not None:
                raise KubernetesError(status=refusal[0], reason="Refused", message=refusal[1], details={})
            if request.action == action.CREATE:
                self._stamp(request)
            elif request.action == action.DELETE and plural in WITH_FINALIZER:
                stored = self.find(plural, request.name, request.namespace)
                if stored is not None:
                    stored["metadata"]["finalizers"] = [WITH_FINALIZER[plural]]
        return await super()._handle(request)

    def _stamp(self, request) -> None:
        metadata = request.data["metadata"]
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": metadata.get("creationTimestamp", stamp())}
        if request.namespace:
            metadata.setdefault("namespace", request.namespace)

    async def note(self, resource, event) -> None:
        """Gives the changed object its version and tells the watchers."""
        self._last = next(self._versions)
        event["object"].setdefault("metadata", {})["resourceVersion"] = str(self._last)
        async with self._news:
            self._log.append((self._last, resource, copy.deepcopy(event)))
            self._news.notify_all()

    async def changed(self, after: int) -> int:
        """Waits for a change after a version; the newest version."""
        async with self._news:
            await self._news.wait_for(lambda: self._last > after)
        return self._last

    def all(self, plural: str, selector: str = "", namespace: str | None = None) -> list[dict]:
        wanted = dict(each.split("=", 1) for each in selector.split(",") if each)
        found = []
        for (resource, where, _), stored in self.objects.items():
            if resource.plural != plural or stored.deleted or namespace not in (None, where):
                continue
            if wanted.items() <= (stored.raw["metadata"].get("labels") or {}).items():
                found.append(stored.raw)
        return sorted(found, key=lambda each: each["metadata"]["name"])

    def find(self, plural: str, name: str, namespace: str | None = None) -> dict | None:
        return next((each for each in self.all(plural, "", namespace) if each["metadata"]["name"] == name), None)

    async def compact(self) -> None:
        """Forgets all changes: watches that are behind or begin now get 410 Gone."""
        async with self._news:
            self._log.clear()
            self._last = next(self._versions)
            self._compacted = self._last
            self._news.notify_all()

    async def _serve_version(self, request):
        found = await super()._serve_version(request)
        return {**found, "groupVersion": found["groupVersion"].lstrip("/")}  # kmock 0.8 calls the core "/v1"

    async def _serve_list(self, request):
        self.lists += 1
        start = int(request.params.get("continue", "0"))
        limit = min(int(request.params.get("limit", self.page)), self.page)
        found = self.all(request.resource.plural, request.params.get("labelSelector", ""), request.namespace)
        metadata = {"resourceVersion": str(self._last)}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": found[start : start + limit]}

    async def _serve_watch(self, request):
        yield b""
        version = int(request.params.get("resourceVersion") or 0)
        wanted = dict(each.split("=", 1) for each in request.params.get("labelSelector", "").split(",") if each)
        while not self.stopping:
            if version < self._compacted:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                yield {"type": "ERROR", "object": gone}
                return
            seen_all = self._last
            behind = [each for each in self._log if each[0] > version]
            for _, resource, event in behind:
                thing = event["object"]["metadata"]
                here = resource == request.resource and request.namespace in (None, thing.get("namespace"))
                if here and wanted.items() <= (thing.get("labels") or {}).items():
                    yield event
            version = seen_all
            async with self._news:
                await self._news.wait_for(
                    lambda seen=version: seen < self._compacted or self._last > seen or self.stopping
                )

    async def stop_streams(self) -> None:
        """Ends all watches, so that the server can close."""
        async with self._news:
            self.stopping = True
            self._news.notify_all()
