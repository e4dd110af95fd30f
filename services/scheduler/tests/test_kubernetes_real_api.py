"""The Kubernetes backend against a real API server (`make test-k8s`): what needs no kubelet and no controllers.

REFLUX_KUBE_API names the server, REFLUX_KUBE_TOKEN_FILE and REFLUX_KUBE_CA_FILE how to get in, with the rights to make
nodes and custom resource definitions: use a server of its own, such as the one of deploy/kubernetes/real_api.sh.
"""

import asyncio
import contextlib
import os
import uuid

import pytest
from kube_api import stamp
from kube_world import LAUNCH, grant, until

from reflux_scheduler.backends.base import BackendAway, GrantRefused
from reflux_scheduler.backends.kubernetes import api as api_module
from reflux_scheduler.backends.kubernetes.api import ApiFailure, KubernetesApi, open_api
from reflux_scheduler.backends.kubernetes.backend import KubernetesBackend
from reflux_scheduler.backends.kubernetes.names import COMPUTE_DOMAIN, JOBSET, NODE, POD, SECRET, Kind
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

CRD = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
NAMESPACE = Kind("", "v1", "namespaces", "Namespace")
UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
READY_SECONDS = 30

pytestmark = pytest.mark.skipif(
    not os.environ.get("REFLUX_KUBE_API"), reason="no REFLUX_KUBE_API: deploy/kubernetes/real_api.sh starts a server"
)


def settings(namespace: str, **fields) -> KubernetesSettings:
    found = {
        "url": os.environ["REFLUX_KUBE_API"],
        "token_file": os.environ.get("REFLUX_KUBE_TOKEN_FILE", ""),
        "ca_file": os.environ.get("REFLUX_KUBE_CA_FILE", ""),
    }
    return KubernetesSettings(**found, namespace=namespace, node_selector="reflux.dev/test=yes", **fields)


async def ensure(api: KubernetesApi, where: str, body: dict) -> None:
    try:
        await api.create(where, body)
    except ApiFailure as failure:
        if failure.status != 409:
            raise


async def ensure_kind(api: KubernetesApi, kind: Kind) -> None:
    """A definition that takes any spec, where the real one is not installed."""
    names = {"plural": kind.plural, "singular": kind.kind.lower(), "kind": kind.kind, "listKind": f"{kind.kind}List"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": kind.version, "served": True, "storage": True, "schema": schema}
    spec = {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]}
    metadata = {"name": f"{kind.plural}.{kind.group}"}
    body = {"apiVersion": CRD.api_version, "kind": CRD.kind, "metadata": metadata, "spec": spec}
    await ensure(api, CRD.path(), body)
    async with asyncio.timeout(READY_SECONDS):
        while True:
            with contextlib.suppress(ApiFailure):
                await api.list(kind.path())
                return
            await asyncio.sleep(0.1)


@pytest.fixture
async def namespace():
    """A namespace of its own and two nodes of one NVLink domain."""
    name = f"reflux-{uuid.uuid4().hex[:8]}"
    async with open_api(settings(name)) as api:
        for kind in (JOBSET, COMPUTE_DOMAIN):
            await ensure_kind(api, kind)
        await api.create(NAMESPACE.path(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for n in range(2):
            labels = {"reflux.dev/test": "yes", "nvidia.com/gpu.clique": f"{UUID}.1", "kubernetes.io/hostname": f"n{n}"}
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n{n}", "labels": labels}}
            await ensure(api, NODE.path(), body)
            ready = {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": stamp()}
            status = {"allocatable": {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": "4"}, "conditions": [ready]}
            await api.patch(f"{NODE.path(name=f'n{n}')}/status", {"status": status})
        yield name
        await api.delete(NAMESPACE.path(name=name))


async def test_objects_are_taken_watched_and_released(namespace):
    async with KubernetesBackend(settings(namespace, imex=True), LAUNCH) as asked, open_api(settings(namespace)) as api:
        topology = await asked.discover()
        assert [domain.path[-1] for domain in topology.domains("rack")] == [f"{UUID}.1"]
        assert {name: each.state for name, each in (await asked.conditions()).items()}.keys() == {"n0", "n1"}
        await asked.request(grant("n0", "n1"))
        await asked.request(grant("n0", "n1"))
        waiting = await until(asked, "ab12-0", lambda status: status and "0 of 2 agents" in status.reason)
        assert waiting.state == "waiting"
        secret = await api.get(SECRET.path(namespace, "reflux-ab12-0"))
        jobset = await api.get(JOBSET.path(namespace, "reflux-ab12-0"))
        assert secret["metadata"]["ownerReferences"][0]["uid"] == jobset["metadata"]["uid"]
        assert (await api.list(COMPUTE_DOMAIN.path(namespace)))[0]
        await asked.release("ab12-0")
        await until(asked, "ab12-0", lambda status: status is None or status.state == "ended")
        with pytest.raises(GrantRefused):
            await asked.request(grant("n0", "n1"))


async def test_the_pod_template_passes_the_servers_validation(namespace):
    """JobSets are checked by their own controller; a pod of the same template is checked by the server itself."""
    async with KubernetesBackend(settings(namespace), LAUNCH) as asked, open_api(settings(namespace)) as api:
        await asked.request(grant("n0", "n1"))
        jobset = await api.get(JOBSET.path(namespace, "reflux-ab12-0"))
        template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        # Probes by gRPC are newer (1.24) than what real_api.sh can build.
        template["spec"]["containers"][0].pop("readinessProbe")
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"]["name"] = "agent"
        assert (await api.create(POD.path(namespace), pod))["metadata"]["uid"]


async def test_lists_come_in_pages_and_watches_go_on_from_them(namespace, monkeypatch):
    monkeypatch.setattr(api_module, "_PAGE", 2)
    where = SECRET.path(namespace)
    async with open_api(settings(namespace)) as api:
        for name in "abcde":
            await api.create(where, secret(name, kind="test"))
        listed, version = await api.list(where, "kind=test")
        assert [each["metadata"]["name"] for each in listed] == list("abcde")
        await api.create(where, secret("other", kind="other"))
        await api.create(where, secret("f", kind="test"))
        await api.patch(SECRET.path(namespace, "a"), {"metadata": {"labels": {"kind": None}}})
        seen = []
        async with asyncio.timeout(READY_SECONDS):
            async for event in api.watch(where, version, "kind=test"):
                if event["type"] != "BOOKMARK":
                    seen.append((event["type"], event["object"]["metadata"]["name"]))
                if len(seen) == 2:
                    break
        assert seen == [("ADDED", "f"), ("DELETED", "a")]  # it left what the selector selects


async def test_refusals_and_bad_credentials_are_told_apart(namespace, tmp_path):
    where = SECRET.path(namespace)
    async with open_api(settings(namespace)) as api:
        await api.create(where, secret("a"))
        for body, status in ((secret("a"), 409), (secret("Not A Name"), 422)):
            with pytest.raises(ApiFailure) as refused:
                await api.create(where, body)
            assert refused.value.status == status
        with pytest.raises(ApiFailure, match="404"):
            await api.get(SECRET.path(namespace, "none"))
        await api.delete(SECRET.path(namespace, "none"))
    (tmp_path / "token").write_text("of nobody")
    async with open_api(settings(namespace).model_copy(update={"token_file": str(tmp_path / "token")})) as stranger:
        with pytest.raises(BackendAway, match="401"):
            await stranger.list(where)


def secret(name: str, **labels: str) -> dict:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": labels}}
