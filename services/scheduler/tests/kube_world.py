"""How tests ask the Kubernetes backend: short grants, and waiting by asking again."""

import asyncio
import contextlib

from kube_api import NAMESPACE
from kube_cluster import HANG_SECONDS, Cluster

from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import AgentLaunch, BackendAway, Grant, GrantStatus, NodeShare
from reflux_scheduler.backends.kubernetes.backend import KubernetesBackend
from reflux_scheduler.backends.kubernetes.settings import KubernetesSettings

SECRET = "only-in-the-secret"
LAUNCH = AgentLaunch(("sh", "-c", "env; exec sleep 600"), {"REFLUX_STACK_SECRET": SECRET})


def grant(*nodes: str, job: str = "ab12", part: int = 0, gpus: int = 4) -> Grant:
    return Grant(job, part, "test", tuple(NodeShare(node, Resources(gpus=gpus)) for node in nodes))


def backend(where: Cluster, launch: AgentLaunch = LAUNCH, **fields) -> KubernetesBackend:
    return KubernetesBackend(KubernetesSettings(url=where.url, namespace=NAMESPACE, **fields), launch)


async def until(asked: KubernetesBackend, grant_id: str, condition) -> GrantStatus:
    """Asks until the grant's status fulfils a condition; None is a grant that is not listed."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            status = (await asked.grants()).get(grant_id)
            if condition(status):
                return status
            await asyncio.sleep(0.02)


async def until_answered(asked: KubernetesBackend) -> dict[str, GrantStatus]:
    """The first answer after the server was away."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            with contextlib.suppress(BackendAway):
                return dict(await asked.grants())
            await asyncio.sleep(0.02)


async def until_granted(asked: KubernetesBackend, grant_id: str = "ab12-0") -> GrantStatus:
    return await until(asked, grant_id, lambda status: status is not None and status.state == "granted")
