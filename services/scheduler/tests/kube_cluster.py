"""A Kubernetes cluster for tests: an emulated API server, and here what works on its objects in a real cluster.

One loop plays JobSet and LeaderWorkerSet controller, garbage collector, pod scheduler (exact node affinity,
anti-affinity, GPUs, cordons) and kubelet: every pod's command runs as a real process with the pod's environment, Secret
resolved. What is missing: images, volumes, networks (pods share the loopback address), CPU and memory accounting.
"""

import asyncio
import base64
import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import kmock
from aiohttp.test_utils import RawTestServer
from kube_api import NAMESPACE, Api, stamp

HANG_SECONDS = 30
POD_UID = "TEST_POD_UID"
"""In the environment of every process of a pod: what has it dies with the pod, as in a container."""

Spawn = Callable[[list[str], dict[str, str], Path], int]
_PR_SET_PDEATHSIG = 1
_processes: list[subprocess.Popen[bytes]] = []
"""Kept, because the next Popen would reap those that nobody holds, and take their exit status with it."""


def spawn_process(argv: list[str], environment: dict[str, str], log: Path) -> int:
    """Starts a process that dies with this one; its exit status can be waited for."""
    libc = ctypes.CDLL(None)
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    _processes.append(process)
    return process.pid


def processes_of(uid: str) -> list[int]:
    """All living processes of a pod, wherever they hang in the tree."""
    marker = f"{POD_UID}={uid}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


class _QuickServer(RawTestServer):
    """Ends handlers of clients that were killed soon; a minute is the default."""

    async def _make_runner(self, **options):
        return await super()._make_runner(shutdown_timeout=0.2, **options)


class Cluster:
    """Server, controllers and kubelets. `url` is where clients connect."""

    def __init__(
        self, folder: Path, spawn: Spawn = spawn_process, host: Callable[[], str] = lambda: "127.0.0.1"
    ) -> None:
        self.api = Api()
        self._folder = folder
        self._spawn = spawn
        self._host = host
        self._server: kmock.Server | None = None
        self._port: int | None = None
        self._pids: dict[str, int] = {}
        self._seen_uids: set[str] = set()
        self._dead_nodes: set[str] = set()
        self._names = itertools.count()
        self._made: set[str] = set()
        self._killed_at: dict[str, float] = {}
        self.hold_ready: set[str] = set()
        """Nodes on which pods run but never become ready."""

        self.admit = True
        """Whether Kueue lets workloads with a queue start."""

        self.domain_status = "Ready"
        """What the driver says of a ComputeDomain."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> "Cluster":
        await self.api.__aenter__()
        await self.up()
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        for uid in list(self._seen_uids):
            self.kill(uid)
        if self._server is not None:
            await self.down()
        await self.api.__aexit__(None, None, None)

    async def up(self) -> None:
        """Starts the API server, at the same address as before."""
        self.api.stopping = False
        self._server = kmock.Server(self.api, port=self._port, server_cls=_QuickServer)
        await self._server.__aenter__()
        self._port = self._server.port

    async def down(self) -> None:
        """The API server goes away; controllers and kubelets rest until it is back."""
        server, self._server = self._server, None
        assert server is not None
        await self.api.stop_streams()
        await server.__aexit__(None, None, None)

    async def add_node(self, name: str, gpus: int = 4, labels: Mapping[str, str] | None = None, **spec) -> None:
        allocatable = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
        }
        await self.create(
            "/api/v1/nodes",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": f"host-{name}", **(labels or {})}},
                "spec": spec,
                "status": {"allocatable": allocatable, "conditions": [ready]},
            },
        )

    async def add_foreign_pod(self, name: str, spec: dict) -> None:
        """A pod of somebody else, in another namespace; no process runs for it."""
        metadata = {"name": name, "namespace": "theirs", "labels": {"app": "other"}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}
        await self.create("/api/v1/namespaces/theirs/pods", pod)

    async def remove_foreign_pod(self, name: str) -> None:
        """It is gone at once: there is no kubelet that it has to wait for."""
        where = f"/api/v1/namespaces/theirs/pods/{name}"
        await self._send("DELETE", where)
        await self.patch(where, {"metadata": {"finalizers": []}})

    async def revive_node(self, name: str) -> None:
        """The machine is back, empty."""
        self._dead_nodes.discard(name)
        condition = {"type": "Ready", "status": "True", "message": "kubelet is posting ready status"}
        await self.patch(f"/api/v1/nodes/{name}", {"status": {"conditions": [condition]}})

    async def fail_node(self, name: str, *, evict: bool = True) -> None:
        """The machine dies: its processes at once, then the node is NotReady, then its pods are evicted."""
        self._dead_nodes.add(name)
        for pod in self.pods_on(name):
            self.kill(pod["metadata"]["uid"])
        condition = {"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status."}
        await self.patch(f"/api/v1/nodes/{name}", {"status": {"conditions": [condition]}})
        for pod in self.pods_on(name) if evict else ():
            target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            await self.set_pod(pod["metadata"]["name"], phase="Failed", reason="NodeLost", conditions=[target])

    async def evict(self, name: str, message: str = "The node was low on resource: memory.") -> None:
        """The kubelet of a node throws our pods out."""
        for pod in self.pods_on(name):
            self.kill(pod["metadata"]["uid"])
            await self.set_pod(pod["metadata"]["name"], phase="Failed", reason="Evicted", message=message)

    async def cordon(self, name: str) -> None:
        await self.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})

    async def set_node(self, name: str, body: dict) -> None:
        await self.patch(f"/api/v1/nodes/{name}", body)

    async def remove_node(self, name: str) -> None:
        await self._send("DELETE", f"/api/v1/nodes/{name}")

    async def set_pod(self, name: str, **status) -> None:
        await self.patch(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", {"status": status})

    async def delete_pod(self, name: str) -> None:
        await self._send("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

    def pods_on(self, node: str) -> list[dict]:
        return [pod for pod in self.api.all("pods", namespace=NAMESPACE) if pod["spec"].get("nodeName") == node]

    def processes(self) -> list[int]:
        """All living processes of all pods that ever were."""
        return [pid for uid in self._seen_uids for pid in processes_of(uid)]

    def agents(self) -> list[int]:
        """The first process of every pod that ever was."""
        return list(self._pids.values())

    def log(self, pod: str) -> str:
        return (self._folder / f"{pod}.log").read_text()

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Waits for a condition on the objects."""
        version = 0
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                version = await self._news(version)

    async def _run(self) -> None:
        """Reconciles after every change and a few times per second, because processes end without telling."""
        version = 0
        while True:
            if self._server is not None and not self.api.silent.is_set():
                await self._reconcile()
            version = await self._news(version)

    async def _news(self, version: int) -> int:
        """The version of the next change, or the same one after a moment. (wait_for can swallow a cancel in 3.11.)"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.03):
                return await self.api.changed(version)
        return version

    async def _reconcile(self) -> None:
        for plural in ("jobsets", "leaderworkersets"):
            for workload in self.api.all(plural):
                await self._tend(plural, workload)
        for domain in self.api.all("computedomains"):
            if (domain.get("status") or {}).get("status") != self.domain_status:
                where = f"/apis/resource.nvidia.com/v1beta1/namespaces/{NAMESPACE}/computedomains"
                await self.patch(
                    f"{where}/{domain['metadata']['name']}", {"status": {"status": self.domain_status, "nodes": []}}
                )
        for pod in self.api.all("pods", namespace=NAMESPACE):
            await self._serve(pod)

    async def _tend(self, plural: str, workload: dict) -> None:
        """Controller of a workload, and the garbage collector of what it owns."""
        metadata = workload["metadata"]
        where = f"{'/apis/' + workload['apiVersion']}/namespaces/{NAMESPACE}/{plural}/{metadata['name']}"
        mine = [pod for pod in self.api.all("pods") if _owned(pod, metadata["uid"])]
        if metadata.get("deletionTimestamp"):
            for pod in mine:
                if not pod["metadata"].get("deletionTimestamp"):
                    await self.delete_pod(pod["metadata"]["name"])
            if not mine:
                await self._collect(metadata["uid"])
                await self.patch(where, {"metadata": {"finalizers": []}})
            return
        spec = workload["spec"]
        if spec.get("suspend"):
            if "kueue.x-k8s.io/queue-name" in (metadata.get("labels") or {}) and self.admit:
                await self.patch(where, {"spec": {"suspend": False}})
            return
        await self._make_pods(workload, plural)
        groups = [spec] if plural != "jobsets" else spec["replicatedJobs"]
        for group in groups if plural == "jobsets" else ():
            of_job = [pod for pod in mine if pod["metadata"]["labels"].get("test/job") == group["name"]]
            ended = [pod for pod in of_job if pod["status"].get("phase") in ("Failed", "Succeeded")]
            if len(ended) == group["template"]["spec"]["completions"] and not _is_finished(workload):
                condition = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}
                await self.patch(where, {"status": {"conditions": [condition]}})
                for pod in mine:
                    if pod not in of_job and not pod["metadata"].get("deletionTimestamp"):
                        await self.delete_pod(pod["metadata"]["name"])

    async def _make_pods(self, workload: dict, plural: str) -> None:
        metadata, spec = workload["metadata"], workload["spec"]
        if plural == "jobsets":
            made = [(job["name"], job["template"]["spec"]) for job in spec["replicatedJobs"]]
            wanted = [(name, job["completions"], job["template"]) for name, job in made]
        else:
            leader_worker = spec["leaderWorkerTemplate"]
            wanted = [("lws", leader_worker["size"], leader_worker["workerTemplate"])]
        for job, count, template in wanted:
            for index in range(count):
                key = f"{metadata['uid']}/{job}/{index}"
                if key not in self._made:
                    self._made.add(key)
                    await self._make_pod(workload, job, index, template)

    async def _make_pod(self, workload: dict, job: str, index: int, template: dict) -> None:
        metadata = workload["metadata"]
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": metadata["name"]}
        labels = {**template["metadata"]["labels"], "test/job": job}
        name = f"{metadata['name']}-{job}-0-{index}-{next(self._names):05x}"
        assert len(name) <= 63, name
        await self.create(
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": labels,
                    "annotations": dict(template["metadata"].get("annotations") or {}),
                    "ownerReferences": [{**owner, "uid": metadata["uid"], "controller": True}],
                },
                "spec": dict(template["spec"]),
                "status": {"phase": "Pending"},
            },
        )

    async def _collect(self, uid: str) -> None:
        """Deletes what has lost its last owner."""
        alive = {each["metadata"]["uid"] for plural in ("jobsets", "leaderworkersets") for each in self.api.all(plural)}
        for plural, root in (("secrets", "/api/v1"), ("computedomains", "/apis/resource.nvidia.com/v1beta1")):
            for thing in self.api.all(plural):
                owners = {owner["uid"] for owner in thing["metadata"].get("ownerReferences") or ()}
                if uid in owners and not owners & (alive - {uid}):
                    await self._send("DELETE", f"{root}/namespaces/{NAMESPACE}/{plural}/{thing['metadata']['name']}")

    async def _serve(self, pod: dict) -> None:
        """Scheduler and kubelet of one pod."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        node = pod["spec"].get("nodeName", "")
        if pod["metadata"].get("deletionTimestamp"):
            await self._finish(pod)
        elif not node:
            await self._place(pod)
        elif pod["status"].get("phase") in ("Failed", "Succeeded") or node in self._dead_nodes:
            return
        elif uid not in self._pids:
            await self._begin(pod)
        else:
            status = self._exit_status(uid)
            if status is not None:
                self.kill(uid)
                ended = {"terminated": {"exitCode": status, "reason": "Error" if status else "Completed"}}
                containers = [{"name": "agent", "ready": False, "state": ended}]
                phase = "Failed" if status else "Succeeded"
                await self.set_pod(name, phase=phase, containerStatuses=containers, conditions=[])
            elif not _is_ready(pod) and node not in self.hold_ready:
                conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
                await self.set_pod(name, conditions=conditions)

    async def _place(self, pod: dict) -> None:
        nodes = self.api.all("nodes")
        misfits = Counter[str]()
        for node in nodes:
            why = self._misfit(pod, node)
            if not why:
                body = {"spec": {"nodeName": node["metadata"]["name"]}}
                await self.patch(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", body)
                return
            misfits[why] += 1
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(misfits.items()))
        message = f"0/{len(nodes)} nodes are available: {reasons}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if pod["status"].get("conditions") != [condition]:
            await self.set_pod(pod["metadata"]["name"], conditions=[condition])

    def _misfit(self, pod: dict, node: dict) -> str:
        affinity, name = pod["spec"]["affinity"], node["metadata"]["name"]
        terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        labels = node["metadata"]["labels"]
        if not any(
            all(labels.get(each["key"]) in each["values"] for each in term["matchExpressions"]) for term in terms
        ):
            return "didn't match Pod's node affinity/selector"
        ready = next(each for each in node["status"]["conditions"] if each["type"] == "Ready")
        if node["spec"].get("unschedulable") or ready["status"] != "True":
            return "node(s) were unschedulable"
        there = [each for each in self.api.all("pods") if each["spec"].get("nodeName") == name]
        here = [each for each in there if each["status"].get("phase") not in ("Failed", "Succeeded")]
        for term in (affinity.get("podAntiAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution", ()):
            wanted = term["labelSelector"]["matchLabels"].items()
            if any(wanted <= each["metadata"]["labels"].items() for each in here):
                return "didn't match pod anti-affinity rules"
        used = sum(_gpus(each) for each in here)
        if used + _gpus(pod) > int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)):
            return "Insufficient nvidia.com/gpu"
        return ""

    async def _begin(self, pod: dict) -> None:
        """Starts the pod's container, once its Secret is there."""
        (container,) = pod["spec"]["containers"]
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        environment = {"PATH": os.environ["PATH"], POD_UID: uid}
        for source in container.get("envFrom", ()):
            secret = self.api.find("secrets", source["secretRef"]["name"])
            if secret is None:
                return
            environment |= {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        fields = {"spec.nodeName": pod["spec"]["nodeName"], "status.podIP": self._host()}
        for each in container["env"]:
            value = fields[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
            expanded = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], value)
            environment[each["name"]] = expanded
        state = self._folder / name
        state.mkdir()
        environment["REFLUX_STATE_DIR"] = str(state)
        self._seen_uids.add(uid)
        self._pids[uid] = self._spawn(list(container["command"]), environment, self._folder / f"{name}.log")
        running = [{"name": "agent", "ready": True, "state": {"running": {"startedAt": stamp()}}}]
        await self.set_pod(name, phase="Running", containerStatuses=running)

    async def _finish(self, pod: dict) -> None:
        """Stops a deleted pod: SIGTERM, after its grace SIGKILL; then it is gone."""
        uid = pod["metadata"]["uid"]
        pid = self._pids.get(uid)
        if pod["spec"].get("nodeName") in self._dead_nodes and pod["status"].get("phase") == "Running":
            return  # no kubelet confirms that it is gone
        if pid is not None and self._exit_status(uid) is None:
            if uid not in self._killed_at:
                self._killed_at[uid] = time.monotonic() + pod["spec"]["terminationGracePeriodSeconds"]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                return
            if time.monotonic() < self._killed_at[uid]:
                return
        self.kill(uid)
        await self.patch(
            f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", {"metadata": {"finalizers": []}}
        )

    def _exit_status(self, uid: str) -> int | None:
        """Exit status of a pod's process, None while it lives."""
        pid = self._pids[uid]
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # not our child: started by a helper, which reaps it
            return None if _lives(pid) else 0
        if not found:
            return None
        return os.waitstatus_to_exitcode(status)

    def kill(self, uid: str) -> None:
        """All processes of a pod, at once."""
        first = self._pids.get(uid)
        while pids := {*processes_of(uid), *([first] if first is not None and _lives(first) else [])}:
            for pid in pids:  # again and again, because one may have forked meanwhile
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if first is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(first, 0)

    async def create(self, where: str, body: dict) -> None:
        await self._send("POST", where, body)

    async def patch(self, where: str, body: dict) -> None:
        await self._send("PATCH", where, body)

    async def _send(self, method: str, where: str, body: dict | None = None) -> None:
        if self._server is None:
            return
        async with self._server.client.request(method, where, json=body) as response:
            assert response.status in (200, 404), await response.text()


def _lives(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _owned(thing: dict, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in thing["metadata"].get("ownerReferences") or ())


def _gpus(pod: dict) -> int:
    (container,) = pod["spec"]["containers"]
    return int((container["resources"].get("limits") or {}).get("nvidia.com/gpu", 0))


def _is_ready(pod: dict) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions") or ())


def _is_finished(workload: dict) -> bool:
    return any(each["type"] == "Failed" for each in (workload.get("status") or {}).get("conditions") or ())
