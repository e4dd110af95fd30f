"""Grants as manifests: exact nodes, Secrets, Kueue's topology requests, ComputeDomains, LeaderWorkerSets."""

import asyncio
import base64
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kmock
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_api import Api
from kube_schema import check_manifest, check_model

from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch, Grant, GrantRefused, NodeShare
from reflux_scheduler.backends.kubernetes.kueue import topology_annotations
from reflux_scheduler.backends.kubernetes.manifests import owned_by, render
from reflux_scheduler.backends.kubernetes.names import MAX_BASE, base_name, label_value, parse_quantity
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings, Toleration

GOLDEN = Path(__file__).with_name("golden")
UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
BLOCK, CLIQUE, HOST = "cloud.provider.com/topology-block", "nvidia.com/gpu.clique", "kubernetes.io/hostname"
SECRET = "5ta<k\"secret'"
LAUNCH = AgentLaunch(("reflux-agent",), {"REFLUX_STACK_SECRET": SECRET, "REFLUX_SCHEDULER_ADDRESS": "scheduler:7001"})
TRAY = Resources(gpus=4, millicpus=128_000, memory_bytes=800 << 30)
NO_GPU = Resources(millicpus=8_000, memory_bytes=64 << 30)
KUEUE = {"kueue_queue": "rl", "kueue_levels": (BLOCK, CLIQUE, HOST)}


def labels(racks: int = 2, per_rack: int = 4) -> dict[str, dict[str, str]]:
    nodes = {
        f"gb-{rack}-{n}": {BLOCK: "b1", CLIQUE: f"{UUID}.{rack}", HOST: f"host-{rack}-{n}"}
        for rack in range(racks)
        for n in range(per_rack)
    }
    return nodes | {"cpu-0": {HOST: "host-cpu-0"}}


def grant(*nodes: str, each: Resources = TRAY, cpu_nodes: tuple[str, ...] = ()) -> Grant:
    shares = [NodeShare(node, each) for node in nodes] + [NodeShare(node, NO_GPU) for node in cpu_nodes]
    return Grant("a1b2c3d4e5f6", 0, "xrd run", tuple(shares), "gb200/b1")


def rendered(what: Grant, **fields):
    bundle = render(what, LAUNCH, KubernetesSettings(**fields), labels())
    owners = [each | {"metadata": each["metadata"] | {"uid": "u"}} for each in bundle.workloads]
    for manifest in (*bundle.workloads, *(owned_by(each, owners) for each in bundle.dependents)):
        check_manifest(manifest)
    return bundle


def jobs(bundle) -> list[dict]:
    return [job["template"] for workload in bundle.workloads for job in workload["spec"]["replicatedJobs"]]


def pods(bundle) -> list[dict]:
    return [job["spec"]["template"] for job in jobs(bundle)]


def hosts(pod: dict) -> list[str]:
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ((term,),) = (terms["nodeSelectorTerms"],)
    ((expression,),) = (term["matchExpressions"],)
    assert (expression["key"], expression["operator"]) == (HOST, "In")
    return expression["values"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("jobset", {}),
        ("kueue_imex", {**KUEUE, "imex": True, "priority_class": "high", "service_account": "agent"}),
        ("leaderworkerset", {"workload": "leaderworkerset", "exclusive_key": CLIQUE, "tolerations": ()}),
    ],
)
def test_a_grant_is_written_as_the_golden_file_says(name, fields):
    bundle = rendered(grant("gb-0-0", "gb-0-1", "gb-1-0", "gb-1-1", cpu_nodes=("cpu-0",)), **fields)
    found = [*bundle.workloads, *bundle.dependents]
    assert found == list(yaml.safe_load_all((GOLDEN / f"kubernetes_{name}.yaml").read_text()))


def test_pods_go_to_exactly_the_nodes_of_the_grant_one_each():
    (pod,) = pods(rendered(grant("gb-0-1", "gb-1-3")))
    assert hosts(pod) == ["host-0-1", "host-1-3"]
    (anti,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert anti == {"topologyKey": HOST, "labelSelector": {"matchLabels": {"reflux.dev/grant": "a1b2c3d4e5f6-0"}}}
    (job,) = jobs(rendered(grant("gb-0-1", "gb-1-3")))
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 2)


def test_a_lost_agent_never_ends_the_others():
    bundle = rendered(grant("gb-0-0", "gb-0-1", cpu_nodes=("cpu-0",)))
    for job in jobs(bundle):
        assert job["spec"]["backoffLimitPerIndex"] == 0
        assert "backoffLimit" not in job["spec"]
        assert "activeDeadlineSeconds" not in job["spec"]
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert [len(each["spec"]["replicatedJobs"]) for each in bundle.workloads] == [1, 1], "one JobSet per shape"


def test_with_kueue_all_shapes_are_admitted_together():
    bundle = rendered(grant("gb-0-0", "gb-0-1", cpu_nodes=("cpu-0",)), **KUEUE)
    (workload,) = bundle.workloads
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    assert workload["spec"]["suspend"] is True
    gpu, cpu = (pod["metadata"]["annotations"] for pod in pods(bundle))
    assert gpu["kueue.x-k8s.io/podset-required-topology"] == CLIQUE
    assert cpu["kueue.x-k8s.io/podset-required-topology"] == HOST


def test_more_shapes_than_kueue_takes_are_refused_at_once():
    with pytest.raises(GrantRefused, match="2 shapes of nodes; this Kueue takes 1"):
        rendered(grant("gb-0-0", cpu_nodes=("cpu-0",)), **KUEUE, kueue_max_pod_sets=1)


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (["gb-0-0", "gb-0-1", "gb-0-2"], {"required-topology": CLIQUE}),
        (
            ["gb-0-0", "gb-0-1", "gb-1-0", "gb-1-1"],
            {"required-topology": BLOCK, "slice-required-topology": CLIQUE, "slice-size": "2"},
        ),
        (["gb-0-0", "gb-0-1", "gb-1-0"], {"required-topology": BLOCK}),
        (["gb-0-0", "cpu-0"], {"unconstrained-topology": "true"}),
        (["cpu-0"], {"required-topology": HOST}),
    ],
)
def test_kueue_is_asked_for_the_domains_that_the_placement_uses(nodes, wanted):
    found = topology_annotations((BLOCK, CLIQUE, HOST), [labels()[node] for node in nodes])
    assert found == {f"kueue.x-k8s.io/podset-{key}": value for key, value in wanted.items()}


@settings(max_examples=50, deadline=None)
@given(
    places=st.lists(
        st.tuples(*(st.sampled_from(["", "a", "b"]),) * 2, st.integers(0, 5)), min_size=1, max_size=8, unique=True
    )
)
def test_kueue_requests_hold_for_the_nodes_that_they_are_made_for(places):
    levels = (BLOCK, CLIQUE, HOST)
    nodes = [{BLOCK: block, CLIQUE: rack, HOST: f"{block}{rack}{n}"} for block, rack, n in places]
    found = topology_annotations(levels, nodes)
    whole = [key for key in found if key.endswith(("podset-required-topology", "podset-unconstrained-topology"))]
    assert len(whole) == 1
    required = found.get("kueue.x-k8s.io/podset-required-topology")
    if required:
        assert len({node[required] for node in nodes}) == 1
        assert nodes[0][required]
    sliced = found.get("kueue.x-k8s.io/podset-slice-required-topology")
    if sliced:
        size = int(found["kueue.x-k8s.io/podset-slice-size"])
        depth = levels.index(sliced) + 1
        paths = [tuple(node[key] for key in levels[:depth]) for node in nodes]
        assert size > 1
        assert all(paths.count(path) % size == 0 for path in paths)


def test_nodes_of_one_nvlink_domain_share_a_compute_domain():
    bundle = rendered(grant("gb-0-0", "gb-0-1", "gb-1-0", "gb-1-1", "gb-1-2", cpu_nodes=("cpu-0",)), imex=True)
    domains = [each for each in bundle.dependents if each["kind"] == "ComputeDomain"]
    assert [each["spec"]["numNodes"] for each in domains] == [2, 3]
    claims = {
        tuple(hosts(pod)): [each["resourceClaimTemplateName"] for each in pod["spec"].get("resourceClaims", ())]
        for pod in pods(bundle)
    }
    first, second = (each["spec"]["channel"]["resourceClaimTemplate"]["name"] for each in domains)
    assert claims == {
        ("host-0-0", "host-0-1"): [first],
        ("host-1-0", "host-1-1", "host-1-2"): [second],
        ("host-cpu-0",): [],
    }


@pytest.mark.parametrize("nodes", [("gb-0-0",), ("gb-0-0", "gb-1-0"), ("cpu-0",)])
def test_a_single_node_of_an_nvlink_domain_needs_no_compute_domain(nodes):
    assert [each["kind"] for each in rendered(grant(*nodes), imex=True).dependents] == ["Secret"]


def test_the_stack_secret_is_in_the_secret_and_nowhere_else():
    bundle = rendered(grant("gb-0-0"), **KUEUE)
    (secret,) = bundle.dependents
    assert base64.b64decode(secret["data"]["REFLUX_STACK_SECRET"]).decode() == SECRET
    for text in (SECRET, base64.b64encode(SECRET.encode()).decode(), json.dumps(SECRET)[1:-1]):
        assert text not in json.dumps(bundle.workloads)
    (container,) = pods(bundle)[0]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]


def test_agents_get_what_belongs_to_the_stack_and_not_what_belongs_to_the_schedulers_pod():
    mine = {"PATH": "/bin", "HOSTNAME": "scheduler", "REFLUX_ADVERTISE_HOST": "scheduler", "BASH_FUNC_x%%": "() { :; }"}
    launch = AgentLaunch(LAUNCH.argv, {**LAUNCH.environment, **mine, "OTEL_SERVICE_NAME": "agent"})
    (secret,) = render(grant("gb-0-0"), launch, KubernetesSettings(), labels()).dependents
    assert set(secret["data"]) == {*LAUNCH.environment, "OTEL_SERVICE_NAME"}


def test_exclusive_topology_stands_on_the_job_and_not_on_the_pod():
    bundle = rendered(grant("gb-0-0", "gb-0-1", "gb-1-0"), exclusive_key=CLIQUE)
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert [job["metadata"]["annotations"] for job in jobs(bundle)] == [{key: CLIQUE}] * 2
    assert all(key not in pod["metadata"]["annotations"] for pod in pods(bundle))


def test_what_an_operator_sets_reaches_the_pod():
    fields = {
        "image": "registry/agent:1",
        "image_pull_policy": "Always",
        "image_pull_secrets": ("pull",),
        "service_account": "agents",
        "priority_class": "high",
        "scheduler_name": "kai-scheduler",
        "tolerations": (Toleration(key="gpu", operator="Equal", value="yes", effect="NoSchedule"),),
        "extra_resources": {"rdma/hca": "1"},
        "grace_seconds": 7,
        "run_as_user": 0,
        "shm_bytes": 1 << 30,
        "host_network": True,
        "agent_port": 0,
    }
    (pod,) = pods(rendered(grant("gb-0-0"), **fields))
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry/agent:1", "Always")
    assert (spec["serviceAccountName"], spec["priorityClassName"], spec["schedulerName"]) == (
        "agents",
        "high",
        "kai-scheduler",
    )
    assert spec["tolerations"][0] == {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
    assert container["resources"]["limits"] == {"memory": str(800 << 30), "nvidia.com/gpu": "4", "rdma/hca": "1"}
    assert container["resources"]["requests"] == {"cpu": "128000m", "memory": str(800 << 30)}
    assert spec["terminationGracePeriodSeconds"] == 7
    assert "securityContext" not in spec
    assert spec["hostNetwork"]
    assert "readinessProbe" not in container
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(1 << 30)}} in spec["volumes"]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (("gb-0-0", "gb-0-0"), "share the host name host-0-0"),
        ((), "names no node"),
    ],
)
def test_a_grant_that_cannot_be_exact_is_refused(nodes, why):
    with pytest.raises(GrantRefused, match=why):
        rendered(grant(*nodes))


@settings(max_examples=60, deadline=None)
@given(
    stack=st.from_regex(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", fullmatch=True),
    ids=st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=2, unique=True),
)
def test_names_are_legal_and_differ_for_different_grants(stack, ids):
    first, second = (base_name(KubernetesSettings(stack=stack).stack, each) for each in ids)
    assert first != second
    for name in (first, second):
        assert len(name) <= MAX_BASE
        jsonschema.validate(name, {"type": "string", "pattern": r"^[a-z]([a-z0-9-]*[a-z0-9])?$"})
    check_model({"metadata": {"labels": {"x": label_value(ids[0])}}}, "V1PodTemplateSpec", "pod")


def test_a_gang_of_a_thousand_nodes_stays_far_below_the_size_limit_of_objects():
    many = {f"node-{n}.cluster.example": {HOST: f"node-{n}.cluster.example"} for n in range(1152)}
    shares = tuple(NodeShare(node, TRAY) for node in many)
    bundle = render(Grant("a1b2c3d4e5f6", 0, "big", shares), LAUNCH, KubernetesSettings(), many)
    (workload,) = bundle.workloads
    check_manifest(workload)
    assert len(json.dumps(workload)) < 200_000


@pytest.mark.parametrize(
    ("text", "amount"), [("4", 4), ("1500m", 1.5), ("8Gi", 8 << 30), ("1e3", 1000), ("0.5", 0.5), ("12k", 12000)]
)
def test_quantities_are_read(text, amount):
    assert float(parse_quantity(text)) == amount


@pytest.mark.parametrize("text", ["", "4 GPUs", "1Zi", "..", "-"])
def test_what_is_no_quantity_is_an_error(text):
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@pytest.mark.parametrize("stack", ["1st", "UPPER", "a_b", "trailing-", ""])
def test_a_stack_name_that_cannot_begin_names_is_an_error(stack):
    with pytest.raises(ValueError, match="stack"):
        KubernetesSettings(stack=stack)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _, job: job["template"]["spec"].update(restartpolicy="Never"),
        lambda _, job: job.update(parallelism="2"),
        lambda _, job: job["template"]["spec"]["containers"][0].pop("name"),
        lambda _, job: job["template"]["spec"].pop("volumes"),
        lambda workload, _: workload["spec"].update(suspended=True),
    ],
)
def test_the_checker_of_manifests_finds_mistakes(spoil):
    (workload,) = rendered(grant("gb-0-0")).workloads
    spoil(workload, workload["spec"]["replicatedJobs"][0]["template"]["spec"])
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        check_manifest(workload)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed: its parser is not asked")
async def test_kubectl_takes_the_manifests(tmp_path):
    bundle = rendered(grant("gb-0-0", "gb-0-1"), imex=True)
    file = tmp_path / "grant.yaml"
    file.write_text(yaml.safe_dump_all([*bundle.workloads, *bundle.dependents]))
    async with Api() as api, kmock.Server(api) as server:
        command = ["kubectl", "create", "--dry-run=client", "--validate=false", "-o", "name", "-f", str(file)]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, "--server", str(server.url), "--cache-dir", str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3
