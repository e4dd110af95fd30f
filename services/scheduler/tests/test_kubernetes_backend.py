"""The Kubernetes backend against an emulated API server; pods are real processes."""

import asyncio
import json
import ssl
import time

import pytest
from kube_api import NAMESPACE, stamp
from kube_cluster import HANG_SECONDS, Cluster
from kube_world import LAUNCH, SECRET, backend, grant, until, until_answered, until_granted

from reflux_kit.errors import StartupError
from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch, BackendAway, Grant, GrantRefused, GrantStatus, NodeShare
from reflux_scheduler.backends.kubernetes.backend import KubernetesBackend
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
TLS_CONTEXT = ssl.create_default_context()
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"


@pytest.fixture(autouse=True)
def one_tls_context(monkeypatch):
    """The client reads the system's certificates for every connection, for plain HTTP as well: 20 ms each time."""
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: TLS_CONTEXT)


@pytest.fixture
async def cluster(tmp_path):
    """Two racks of two nodes in one block; nothing that pods started outlives the test."""
    async with Cluster(tmp_path) as cluster:
        for n in range(4):
            labels = {"cloud.provider.com/topology-block": "b1", "nvidia.com/gpu.clique": f"{UUID}.{n // 2}"}
            await cluster.add_node(f"n{n}", labels=labels)
        yield cluster
    assert cluster.processes() == []


async def test_a_grant_runs_one_agent_on_each_of_its_nodes_and_leaves_nothing(cluster):
    async with backend(cluster) as asked:
        assert await asked.grants() == {}
        await asked.request(grant("n1", "n3"))
        status = await until_granted(asked)
        assert status == GrantStatus("ab12-0", "granted", "jobset reflux-ab12-0")
        assert len(cluster.processes()) == 2
        for node in ("n1", "n3"):
            (pod,) = cluster.pods_on(node)
            environment = dict(line.split("=", 1) for line in cluster.log(pod["metadata"]["name"]).splitlines())
            assert environment["REFLUX_AGENT_NODE"] == node
            assert environment["REFLUX_AGENT_GRANT"] == "ab12-0"
            assert environment["REFLUX_STACK_SECRET"] == SECRET
            assert environment["REFLUX_AGENT_LISTEN"] == "127.0.0.1:7007"
            assert SECRET not in json.dumps(pod)
        await asked.release("ab12-0")
        await until(asked, "ab12-0", lambda status: status is None)
    for plural in ("jobsets", "pods", "secrets"):
        assert cluster.api.all(plural) == []
    assert cluster.processes() == []


async def test_the_same_request_twice_makes_one_grant(cluster):
    async with backend(cluster) as asked, backend(cluster) as other:
        await asked.request(grant("n0"))
        await until_granted(asked)
        before = cluster.api.all("jobsets"), cluster.processes()
        await asked.request(grant("n0"))
        await other.request(grant("n0"))
        assert (cluster.api.all("jobsets"), cluster.processes()) == before
        assert (await other.grants())["ab12-0"].state == "granted"


async def test_a_request_that_was_cut_off_is_completed_by_the_next(cluster):
    """The scheduler dies between two objects: the JobSet is there, suspended, without its Secret."""
    async with backend(cluster) as asked:
        cluster.api.refusals["POST", "secrets"] = (503, "etcdserver: leader changed")
        with pytest.raises(BackendAway, match="leader changed"):
            await asked.request(grant("n0"))
        await cluster.until(lambda: cluster.api.all("jobsets"))
        assert (await asked.grants())["ab12-0"].reason == "suspended"
        cluster.api.refusals.clear()
        await asked.request(grant("n0"))
        await until_granted(asked)


async def test_part_of_a_gang_is_never_granted(cluster):
    async with backend(cluster) as asked:
        await asked.request(grant("n0", job="other"))
        await until_granted(asked, "other-0")
        await asked.request(grant("n0", "n1"))
        await cluster.until(lambda: cluster.pods_on("n1"))
        waiting = await until(asked, "ab12-0", lambda status: status and "1 of 2 agents are ready" in status.reason)
        assert waiting.state == "waiting"
        assert "Unschedulable: 0/4 nodes are available: 1 Insufficient nvidia.com/gpu" in waiting.reason
        await asked.release("other-0")
        assert (await until_granted(asked)).lost_nodes == ()


async def test_agents_that_run_but_are_not_ready_are_not_granted(cluster):
    cluster.hold_ready.add("n1")
    async with backend(cluster) as asked:
        await asked.request(grant("n0", "n1"))
        await cluster.until(lambda: len(cluster.processes()) == 2)
        status = await until(asked, "ab12-0", lambda status: status is not None and "1 of 2" in status.reason)
        assert status.state == "waiting"
        cluster.hold_ready.clear()
        await until_granted(asked)


async def test_a_grant_that_is_not_complete_in_time_is_given_up_with_the_reason(cluster):
    cluster.domain_status = "NotReady"
    async with backend(cluster, imex=True, start_deadline_seconds=0.2) as asked:
        await asked.request(grant("n0", "n1"))
        ended = await until(asked, "ab12-0", lambda status: status is not None and status.state == "ended")
        assert ended.reason.startswith("not complete after 0.2 s: ")
        await cluster.until(lambda: not cluster.api.all("jobsets"))
        ended = (await asked.grants())["ab12-0"]
        assert cluster.api.all("computedomains") == cluster.api.all("secrets") == cluster.processes() == []
        await asked.request(grant("n0", "n1"))
        assert (await asked.grants())["ab12-0"] == ended, "never granted again under this id"
        assert cluster.api.all("jobsets") == []


async def test_a_grant_waits_for_its_compute_domain(cluster):
    cluster.domain_status = "NotReady"
    async with backend(cluster, imex=True) as asked:
        await asked.request(grant("n0", "n1"))
        waits = "ComputeDomain reflux-ab12-0-nvl-0 is NotReady"
        assert (await until(asked, "ab12-0", lambda status: status and status.reason == waits)).state == "waiting"
        cluster.domain_status = "Ready"
        await until_granted(asked)
        (domain,) = cluster.api.all("computedomains")
        assert domain["metadata"]["ownerReferences"][0]["kind"] == "JobSet"


async def test_kueue_decides_when_a_grant_starts(cluster):
    cluster.admit = False
    async with backend(cluster, kueue_queue="rl", start_deadline_seconds=0.01) as asked:
        await asked.request(grant("n0"))
        await asyncio.sleep(0.05)  # longer than the deadline, which must not count yet
        status = (await asked.grants())["ab12-0"]
        assert (status.state, status.reason) == ("waiting", "suspended: Kueue has not admitted it")
    async with backend(cluster, kueue_queue="rl") as asked:
        cluster.admit = True
        await until_granted(asked)


async def test_a_dead_node_is_lost_and_the_other_agents_run_on(cluster):
    async with backend(cluster) as asked:
        await asked.request(grant("n0", "n1", "n2"))
        await until_granted(asked)
        await cluster.fail_node("n0")
        await cluster.fail_node("n1")
        status = await until(asked, "ab12-0", lambda status: len(status.lost_nodes) == 2)
        assert status.state == "granted"
        assert status.lost_nodes == ("n0", "n1")
        assert "NodeLost" in status.reason
        conditions = await asked.conditions()
        assert [conditions[f"n{n}"].state for n in range(3)] == ["down", "down", "up"]
        assert "stopped posting" in conditions["n0"].reason
        (survivor,) = cluster.pods_on("n2")
        assert survivor["status"]["phase"] == "Running"
        assert len(cluster.processes()) == 1
        await cluster.fail_node("n2")
        status = await until(asked, "ab12-0", lambda status: len(status.lost_nodes) == 3)
        assert status.state == "granted", "it is the scheduler that gives it back"


@pytest.mark.parametrize("how", ["evict", "delete_pod", "remove_node"])
async def test_an_agent_that_the_cluster_takes_away_is_a_lost_node(cluster, how):
    async with backend(cluster) as asked:
        await asked.request(grant("n0", "n1"))
        await until_granted(asked)
        (pod,) = cluster.pods_on("n1")
        await getattr(cluster, how)("n1" if how != "delete_pod" else pod["metadata"]["name"])
        status = await until(asked, "ab12-0", lambda status: status.lost_nodes)
        assert (status.state, status.lost_nodes) == ("granted", ("n1",))
        assert status.reason.startswith("n1: ")
        if how == "evict":
            assert "Evicted: The node was low on resource: memory." in status.reason


async def test_an_agent_that_ends_before_the_gang_is_complete_ends_the_grant(cluster):
    cluster.hold_ready.update(("n0", "n1"))
    launch = AgentLaunch(("sh", "-c", "test $REFLUX_AGENT_NODE = n0 && exit 3; exec sleep 600"), {})
    async with backend(cluster, launch) as asked:
        await asked.request(grant("n0", "n1"))
        ended = await until(asked, "ab12-0", lambda status: status is not None and status.state == "ended")
        assert "the agent ended with status 3" in ended.reason


async def test_nodes_tell_whether_they_take_work_and_what_others_hold(cluster):
    await cluster.cordon("n0")
    await cluster.set_node("n1", {"spec": {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]}})
    await cluster.set_node("n2", {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}})
    async with backend(cluster) as asked:
        await asked.request(grant("n2"))
        await until_granted(asked)
        container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "500m"}}}
        await cluster.add_foreign_pod("theirs", {"nodeName": "n3", "containers": [container]})
        async with asyncio.timeout(HANG_SECONDS):
            while not (conditions := await asked.conditions())["n3"].foreign.gpus:
                await asyncio.sleep(0.02)
        assert (conditions["n0"].state, conditions["n0"].reason) == ("draining", "cordoned")
        assert (conditions["n1"].state, conditions["n1"].reason) == ("draining", "taint team=x:NoSchedule")
        assert conditions["n2"].state == "up"
        assert conditions["n2"].foreign == Resources(), "our own agents are not foreign"
        assert conditions["n3"].foreign == Resources(gpus=1, millicpus=500)


async def test_the_topology_comes_from_node_labels(cluster):
    async with backend(cluster, cluster="gb200", reserve_millicpus=1000) as asked:
        topology = await asked.discover()
    assert [domain.label for domain in topology.domains("rack")] == [f"gb200/b1/{UUID}.{n}" for n in range(2)]
    assert topology.capacity_NR.tolist() == [[4, 15_000, 64 << 30]] * 4


async def test_a_cluster_without_nodes_has_no_topology(tmp_path):
    async with Cluster(tmp_path) as cluster, backend(cluster) as asked:
        assert await asked.discover() is None


async def test_a_new_scheduler_finds_what_the_old_one_was_granted(cluster):
    async with backend(cluster) as old:
        await old.request(grant("n0", "n1"))
        await until_granted(old)
        await old.request(grant("n2", job="cd34"))
    await cluster.until(lambda: len(cluster.processes()) == 3)
    before = cluster.processes()
    await cluster.fail_node("n1")
    async with backend(cluster) as new:
        status = await until(new, "ab12-0", lambda status: status.lost_nodes)
        assert (status.state, status.lost_nodes) == ("granted", ("n1",)), "granted before, so not waiting again"
        await until_granted(new, "cd34-0")
        assert set(cluster.processes()) < set(before)
        for grant_id in await new.grants():
            await new.release(grant_id)
        async with asyncio.timeout(HANG_SECONDS):
            while await new.grants():
                await asyncio.sleep(0.02)
    assert cluster.processes() == []


async def test_two_stacks_in_one_namespace_do_not_see_each_other(cluster):
    async with backend(cluster) as asked, backend(cluster, stack="other") as other:
        await asked.request(grant("n0"))
        await until_granted(asked)
        assert await other.grants() == {}
        await other.release("ab12-0")
        assert (await asked.grants())["ab12-0"].state == "granted"
        assert (await other.conditions())["n0"].foreign.gpus == 4


async def test_the_api_server_is_away_and_comes_back(cluster):
    async with backend(cluster) as asked:
        await asked.request(grant("n0"))
        await until_granted(asked)
        await cluster.down()
        for call in (asked.grants(), asked.conditions(), asked.discover(), asked.release("ab12-0")):
            with pytest.raises(BackendAway):
                await call
        with pytest.raises(BackendAway):
            await asked.request(grant("n1", job="cd34"))
        assert len(cluster.processes()) == 1, "agents do not depend on the API server"
        await cluster.up()
        status = (await until_answered(asked))["ab12-0"]
        assert status.reason == "it was released", "asked for when the server was away, done now"
        await until(asked, "ab12-0", lambda status: status is None)


async def test_a_server_that_does_not_answer_is_away_when_the_deadline_is_over(cluster):
    async with backend(cluster, call_seconds=0.2) as asked:
        assert await until_answered(asked) == {}
        cluster.api.silent.set()
        async with asyncio.timeout(HANG_SECONDS):
            with pytest.raises(BackendAway, match="does not answer"):
                await asked.grants()
        cluster.api.silent.clear()
        assert await until_answered(asked) == {}


async def test_a_watch_that_is_too_old_is_listed_again(cluster):
    async with backend(cluster) as asked:
        assert await asked.grants() == {}
        lists = cluster.api.lists
        await cluster.api.compact()
        await cluster.until(lambda: cluster.api.lists >= lists + 4)
        await asked.request(grant("n0"))
        await until_granted(asked)


async def test_long_lists_come_in_pages(cluster):
    cluster.api.page = 3
    async with backend(cluster) as asked:
        assert len(await asked.conditions()) == 4
        assert cluster.api.calls.count(("GET", "nodes")) >= 2


@pytest.mark.parametrize(
    ("status", "error", "why"),
    [
        (403, GrantRefused, "exceeded quota"),
        (422, GrantRefused, "exceeded quota"),
        (500, BackendAway, "exceeded quota"),
        (401, BackendAway, "exceeded quota"),
    ],
)
async def test_what_the_server_refuses_is_refused_in_its_words(cluster, status, error, why):
    cluster.api.refusals["POST", "jobsets"] = (status, "exceeded quota")
    async with backend(cluster) as asked:
        with pytest.raises(error, match=why):
            await asked.request(grant("n0"))
        assert cluster.api.all("jobsets") == []


async def test_a_grant_that_is_refused_half_way_leaves_nothing(cluster):
    cluster.api.refusals["POST", "computedomains"] = (404, "the server could not find the requested resource")
    async with backend(cluster, imex=True) as asked:
        with pytest.raises(GrantRefused, match="ComputeDomain reflux-ab12-0-nvl-0: HTTP 404"):
            await asked.request(grant("n0", "n1"))
        await until(asked, "ab12-0", lambda status: status is None)
    assert cluster.api.all("secrets") == cluster.api.all("pods") == []


async def test_a_refusal_does_not_end_a_grant_that_runs(cluster):
    async with backend(cluster) as asked:
        await asked.request(grant("n0"))
        await until_granted(asked)
        cluster.api.refusals["POST", "secrets"] = (403, "no longer allowed")
        with pytest.raises(GrantRefused):
            await asked.request(grant("n0"))
        assert (await asked.grants())["ab12-0"].state == "granted"


async def test_a_name_that_somebody_else_uses_is_refused(cluster):
    theirs = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "reflux-ab12-0"}}
    await cluster.create(JOBSETS, {**theirs, "spec": {"suspend": True, "replicatedJobs": []}})
    async with backend(cluster) as asked:
        with pytest.raises(GrantRefused, match="is not of this grant"):
            await asked.request(grant("n0"))
    assert len(cluster.api.all("jobsets")) == 1


async def test_missing_rights_are_named(cluster):
    cluster.api.refusals["GET", "nodes"] = (403, 'nodes is forbidden: User "x" cannot list resource "nodes"')
    async with backend(cluster) as asked:
        with pytest.raises(BackendAway, match="nodes is forbidden"):
            await asked.conditions()


async def test_a_grant_on_a_node_that_is_gone_ends_at_once(cluster):
    async with backend(cluster) as asked:
        await asked.request(grant("n0", "n9"))
        assert await asked.grants() == {"ab12-0": GrantStatus("ab12-0", "ended", reason="the cluster has no node n9")}
    assert cluster.api.all("jobsets") == []


async def test_room_is_not_free_while_agents_stop(cluster):
    launch = AgentLaunch(("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"), {})
    async with backend(cluster, launch) as asked:
        await asked.request(grant("n0", "n1"))
        await until_granted(asked)
        await cluster.until(lambda: "ready" in cluster.log(cluster.pods_on("n0")[0]["metadata"]["name"]))
        await asked.release("ab12-0")
        await cluster.until(lambda: cluster.pods_on("n0")[0]["metadata"].get("deletionTimestamp"))
        status = await until(asked, "ab12-0", lambda status: status.reason == "it was released")
        assert (status.state, status.lost_nodes) == ("granted", ())
        assert cluster.processes()
        for pod in cluster.api.all("pods"):
            cluster.kill(pod["metadata"]["uid"])
        await until(asked, "ab12-0", lambda status: status is None)


@pytest.mark.parametrize("how", ["pod", "jobset"])
async def test_a_node_is_lost_once_its_agent_has_stopped_and_not_before(cluster, how):
    """Whoever replaces its members must not run beside them; and nobody else has asked for its end."""
    launch = AgentLaunch(("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"), {})
    async with backend(cluster, launch) as asked:
        await asked.request(grant("n0", "n1"))
        await until_granted(asked)
        (pod,) = cluster.pods_on("n1")
        await cluster.until(lambda: "ready" in cluster.log(pod["metadata"]["name"]))
        if how == "pod":
            await cluster.delete_pod(pod["metadata"]["name"])
        else:
            await asked._api.delete(f"{JOBSETS}/reflux-ab12-0")
        await cluster.until(lambda: cluster.pods_on("n1")[0]["metadata"].get("deletionTimestamp"))
        status = await until(asked, "ab12-0", lambda status: "it is being deleted" in status.reason)
        assert (status.state, status.lost_nodes) == ("granted", ())
        cluster.kill(pod["metadata"]["uid"])
        status = await until(asked, "ab12-0", lambda status: status.lost_nodes)
        assert (status.state, status.lost_nodes) == ("granted", ("n1",))
        for each in cluster.api.all("pods"):
            cluster.kill(each["metadata"]["uid"])


async def test_a_dead_node_does_not_keep_a_released_grant_alive(cluster):
    """The pod of a machine that is gone stays Terminating for ever."""
    async with backend(cluster) as asked:
        await asked.request(grant("n0", "n1"))
        await until_granted(asked)
        await cluster.fail_node("n0", evict=False)
        await asked.release("ab12-0")
        ended = await until(asked, "ab12-0", lambda status: status is None or status.state == "ended")
        assert ended is not None, "its pod is still there"
        assert cluster.pods_on("n0")


async def test_released_grants_are_refused(cluster):
    async with backend(cluster) as asked:
        await asked.release("zz99-0")
        with pytest.raises(GrantRefused, match="it was released"):
            await asked.request(grant("n0", job="zz99"))


async def test_leader_worker_sets_serve_as_well(cluster):
    async with backend(cluster, workload="leaderworkerset") as asked:
        await asked.request(grant("n0", "n2"))
        assert (await until_granted(asked)).native == "leaderworkerset reflux-ab12-0"
        await asked.release("ab12-0")
        await until(asked, "ab12-0", lambda status: status is None)
    assert cluster.api.all("secrets") == []


async def test_shapes_of_nodes_are_jobsets_of_their_own(cluster):
    shares = (NodeShare("n0", Resources(gpus=4)), NodeShare("n1", Resources(millicpus=100)))
    async with backend(cluster) as asked:
        await asked.request(Grant("ab12", 0, "test", shares))
        assert (await until_granted(asked)).native == "jobset reflux-ab12-0-0 and 1 more"
        await cluster.fail_node("n1")
        await until(asked, "ab12-0", lambda status: status.lost_nodes == ("n1",))
        await cluster.until(lambda: any(each.get("status") for each in cluster.api.all("jobsets")))
        status = (await asked.grants())["ab12-0"]
        assert (status.state, status.lost_nodes) == ("granted", ("n1",)), "one shape is lost, the other runs"
        assert len(cluster.processes()) == 1
        await asked.release("ab12-0")
        await until(asked, "ab12-0", lambda status: status is None)


async def test_no_way_to_the_cluster_is_an_error_at_the_start(monkeypatch, tmp_path):
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StartupError, match="no way to reach Kubernetes"):
        async with KubernetesBackend(KubernetesSettings(), LAUNCH):
            pass
    with pytest.raises(StartupError, match="no way to reach Kubernetes"):
        async with KubernetesBackend(KubernetesSettings(kubeconfig=str(tmp_path / "none")), LAUNCH):
            pass


async def test_a_kubeconfig_or_a_token_file_tells_where_the_cluster_is(cluster, tmp_path):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
        "users": [{"name": "u", "user": {"token": "from-kubeconfig"}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
    }
    file, token = tmp_path / "kubeconfig", tmp_path / "token"
    file.write_text(json.dumps(config))
    token.write_text("from-file\n")
    for fields, expected in (
        ({"kubeconfig": str(file)}, "Bearer from-kubeconfig"),
        ({"url": cluster.url, "token_file": str(token)}, "Bearer from-file"),
    ):
        async with KubernetesBackend(KubernetesSettings(**fields), LAUNCH) as asked:
            assert len(await asked.conditions()) == 4
        assert cluster.api.authorizations[-1] == expected


async def test_old_grants_keep_their_deadline_after_a_restart(cluster):
    """The deadline counts from the server's creation time, not from when this scheduler first looked."""
    cluster.hold_ready.add("n0")
    async with backend(cluster) as asked:
        await asked.request(grant("n0"))
        (made,) = cluster.api.all("jobsets")
        past = {"metadata": {"creationTimestamp": stamp(time.time() - 3600)}}
        await cluster.patch(f"{JOBSETS}/{made['metadata']['name']}", past)
    async with backend(cluster, start_deadline_seconds=1800) as asked:
        ended = await until(asked, "ab12-0", lambda status: status is not None and status.state == "ended")
        assert "not complete after 1800 s: 0 of 1 agents are ready" in ended.reason
        assert cluster.processes() == []
