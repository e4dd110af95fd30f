"""The example manifests: they parse, fit each other, and give the rights that the backend uses and no others."""

import tomllib
from pathlib import Path

import pytest
import yaml
from kube_api import NAMESPACE
from kube_cluster import Cluster
from kube_schema import check_model
from kube_world import backend, grant, until, until_granted

from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

FOLDER = Path(__file__).parents[3] / "deploy/kubernetes"
OBJECTS = list(yaml.safe_load_all((FOLDER / "scheduler.yaml").read_text()))


def one(kind: str, name: str = "reflux-scheduler") -> dict:
    (found,) = [each for each in OBJECTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def rights(kind: str) -> set[tuple[str, str, str]]:
    return {
        (verb, group, resource)
        for rule in one(kind)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_every_object_is_one_that_an_api_server_takes(manifest):
    check_model(manifest, f"V1{manifest['kind']}", manifest["kind"])
    namespaced = manifest["kind"] not in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    assert manifest["metadata"].get("namespace") == (NAMESPACE if namespaced else None)


def test_kueues_example_agrees_with_the_levels_of_the_scheduler():
    topology, flavor, queue, local = yaml.safe_load_all((FOLDER / "kueue.yaml").read_text())
    levels = [each["nodeLabel"] for each in topology["spec"]["levels"]]
    assert flavor["spec"]["topologyName"] == topology["metadata"]["name"]
    assert flavor["spec"]["nodeLabels"]
    (group,) = queue["spec"]["resourceGroups"]
    assert group["flavors"][0]["name"] == flavor["metadata"]["name"]
    assert {each["name"] for each in group["flavors"][0]["resources"]} == set(group["coveredResources"])
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    text = one("ConfigMap")["data"]["kubernetes.toml"].replace("# kueue", "kueue").replace("# imex", "imex")
    options = KubernetesSettings(**tomllib.loads(text))
    assert list(options.kueue_levels) == levels
    assert options.kueue_queue == local["metadata"]["name"]
    assert options.imex


def test_the_options_are_settings_of_the_backend():
    options = KubernetesSettings(**tomllib.loads(one("ConfigMap")["data"]["kubernetes.toml"]))
    assert options.namespace == NAMESPACE
    assert options.service_account == one("ServiceAccount", "reflux-agent")["metadata"]["name"]
    assert list(options.level_keys) == ["rack", "block", "zone"]


def test_the_deployment_refers_to_what_is_there():
    spec = one("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    assert environment["REFLUX_SCHEDULER_BACKEND"] == "kubernetes"
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "options"]
    folder, _, file = environment["REFLUX_SCHEDULER_BACKEND_OPTIONS"].rpartition("/")
    assert (folder, file) == (mount, *one("ConfigMap")["data"])
    (port,) = [each["port"] for each in one("Service")["spec"]["ports"] if each["name"] == "grpc"]
    assert environment["REFLUX_SCHEDULER_ADDRESS"] == f"reflux-scheduler.{NAMESPACE}.svc:{port}"
    assert spec["serviceAccountName"] == one("RoleBinding")["subjects"][0]["name"]


async def test_the_rights_are_those_that_the_backend_uses(tmp_path):
    """Needed and not given: the scheduler fails in production. Given and not needed: a stolen token can do more."""
    used = set()
    for workload in ("jobset", "leaderworkerset"):
        folder = tmp_path / workload
        folder.mkdir()
        async with Cluster(folder) as cluster:
            for n in range(2):
                labels = {"nvidia.com/gpu.clique": "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"}
                await cluster.add_node(f"n{n}", labels=labels)
            async with backend(cluster, workload=workload, imex=True) as asked:
                await asked.conditions()
                await asked.request(grant("n0", "n1"))
                await asked.request(grant("n0", "n1"))
                await until_granted(asked)
                await asked.release("ab12-0")
                await until(asked, "ab12-0", lambda status: status is None)
            used |= cluster.api.rights
    named = {(verb, group, plural) for verb, group, plural, namespace in used if namespace}
    global_ = {(verb, group, plural) for verb, group, plural, namespace in used if not namespace}
    reading = {("get", "", "pods"), ("get", "", "nodes")}
    assert named <= rights("Role")
    assert rights("Role") - reading == named, "nothing but reading pods is given beyond what is used"
    assert global_ <= rights("ClusterRole")
    assert rights("ClusterRole") - reading == global_
