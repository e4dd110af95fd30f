"""A job that outlives whoever asked for it: started on first use, found by a restarted trainer, ended when idle."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from uuid import NAMESPACE_OID, uuid5

import grpc

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit.errors import Unavailable
from reflux_trainer.jobs import cancel_job, is_alive
from reflux_trainer.peers import Peers

log = logging.getLogger(__name__)
_SEEN_SECONDS = 2.0


class StandingJob:
    """Owns one job. Redis has its name behind the number of its start, which makes two that start it at once one."""

    def __init__(self, peers: Peers, key: str, name: str, roles: Callable[[], Sequence[job_pb2.RoleSpec]]) -> None:
        """`key` is where Redis has the job's name; `name` is what people and the scheduler call it."""
        self._peers, self._key, self._name, self._roles = peers, key, name, roles
        self._lock = asyncio.Lock()
        self._alive_until = 0.0

    async def ensure(self) -> None:
        """Returns when the job exists. Raises Unavailable with the scheduler's words when it cannot."""
        async with self._lock:
            if time.monotonic() < self._alive_until:
                return
            starts, job = await self._known()
            if not job or not await self._alive(job):
                await self._create(starts + 1)
            self._alive_until = time.monotonic() + _SEEN_SECONDS

    async def stop(self) -> bool:
        """Gives the processes back; False when there are none. The next use starts others."""
        async with self._lock:
            starts, job = await self._known()
            self._alive_until = 0.0
            if not job:
                return False
            log.info("%s idles, %s ends", self._name, job)
            await cancel_job(self._peers, job)
            await self._peers.redis.set(self._key, f"{starts} ")
            return True

    async def _known(self) -> tuple[int, str]:
        starts, _, job = ((await self._peers.redis.get(self._key)) or b"0 ").decode().partition(" ")
        return int(starts), job

    async def _alive(self, job: str) -> bool:
        try:
            return await is_alive(self._peers, job)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the scheduler does not answer ({error.code().name})") from None

    async def _create(self, start: int) -> None:
        request_id = str(uuid5(NAMESPACE_OID, f"{self._key}/{start}"))
        request = pb.CreateJobRequest(request_id=request_id, display_name=self._name, roles=self._roles())
        try:
            job = (await self._peers.scheduler.CreateJob(request, timeout=30.0, wait_for_ready=True)).job
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the scheduler did not start {self._name}: {error.details()}") from None
        if job.state == job_pb2.Job.STATE_FAILED:
            raise Unavailable(f"the scheduler cannot place {self._name}: {job.message}")
        log.info("%s starts as %s", self._name, job.name)
        await self._peers.redis.set(self._key, f"{start} {job.name}")
