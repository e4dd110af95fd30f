"""The processes of one run: a job at the scheduler, followed to its end, and the fleet's readiness at the gateway."""

import asyncio
import logging
import time
from pathlib import Path
from uuid import NAMESPACE_OID, uuid5

import grpc

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1 import replica_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_kit import auth
from reflux_runs.config import RunConfig
from reflux_trainer.jobs import ENDED, cancel_job, is_alive, role
from reflux_trainer.peers import Peers
from reflux_trainer.shared import SharedSeats, served_model
from reflux_trainer.watchdog import Waits

log = logging.getLogger(__name__)
_RECONNECT_SECONDS = 0.5
_POLL_SECONDS = 0.2
_SAVED_SECONDS = 5.0


class JobEnded(RuntimeError):
    """The scheduler gave the run's job up, or it ended by itself."""


class StartTimedOut(TimeoutError):
    """The run's processes were not there in time; the message says which and what the scheduler says."""


_ONE_ROW = {
    "REFLUX_ENGINE_MAX_ROWS": "1",
    "REFLUX_ENGINE_PREFIX_CACHE_BYTES": "0",
    "REFLUX_ENGINE_HANDOVER_BYTES": "0",
}
"""An engine whose bits depend on the sequence alone: the learner's deterministic mode computes as it does."""


class RunProcesses:
    """Job and fleet of one run."""

    def __init__(self, run: str, attempt: int, config: RunConfig, model_folder: Path, peers: Peers) -> None:
        self._run = run
        self._attempt = attempt
        self._config = config
        self._model_folder = model_folder
        self._peers = peers
        self._saved_unheard = False
        self._seats = SharedSeats(run, config, peers) if config.fleet.shared else None
        self.job = ""

    async def start(self, known_job: str) -> str:
        """Takes over the job of an earlier attempt when it still runs, or creates one; returns its name."""
        self.job = known_job if known_job and await is_alive(self._peers, known_job) else await self._create()
        return self.job

    async def _create(self) -> str:
        fleet = self._config.fleet
        engines = 0 if fleet.shared else fleet.engines
        counts = {"learner": 1, "engine": engines, "rollout": fleet.rollout_workers}
        request = pb.CreateJobRequest(
            request_id=str(uuid5(NAMESPACE_OID, f"{self._run}/{self._attempt}")),
            display_name=self._run,
            roles=[self._role(name, count) for name, count in counts.items() if count],
        )
        answer = await self._peers.scheduler.CreateJob(request, timeout=30.0, wait_for_ready=True)
        if answer.job.state == job_pb2.Job.STATE_FAILED:
            raise JobEnded(f"the scheduler cannot place the run: {answer.job.message}")
        return answer.job.name

    def _role(self, name: str, count: int) -> job_pb2.RoleSpec:
        settings = self._peers.settings
        environment = {
            "REFLUX_RUN": self._run,
            "REFLUX_ENGINE_MODEL": str(self._model_folder.resolve()),
            "REFLUX_ENGINE_MODEL_ID": self._run,
            "REFLUX_ENGINE_DTYPE": self._config.fleet.weight_dtype,
            "REFLUX_ENGINE_WEIGHT_MODE": self._config.fleet.weight_mode,
            "REFLUX_TRANSPORT": self._config.fleet.transport,
        }
        if self._config.deterministic:
            environment |= _ONE_ROW
        if settings.stack_secret:
            environment["REFLUX_TOKEN"] = auth.mint(settings.stack_secret, name, self._run)
        return role(name, name, environment, count)

    async def keep_seats(self) -> None:
        """Holds the run's seats on a shared fleet until it is cancelled; returns at once without one."""
        if self._seats is not None:
            await self._seats.keep()

    async def follow(self) -> None:
        """Raises JobEnded when the job ends; a scheduler that restarts is waited for."""
        token = ""
        while True:
            try:
                request = pb.WatchJobRequest(name=self.job, resume_token=token)
                async for change in self._peers.scheduler.WatchJob(request):
                    token = change.resume_token
                    if change.job.state in ENDED:
                        state = job_pb2.Job.State.Name(change.job.state).removeprefix("STATE_")
                        raise JobEnded(f"the run's processes are gone: {self.job} {state}: {change.job.message}")
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise JobEnded(f"the scheduler does not know {self.job} any more") from None
                log.info("the scheduler's stream broke (%s), opening it again", error.code().name)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def saved(self) -> None:
        """Tells the scheduler that a checkpoint is committed, so that a move or a preemption costs only later work.

        Best effort within a few seconds: the next checkpoint tells it again. A failure is logged once, until it works.
        """
        request = pb.MarkJobSavedRequest(name=self.job)
        try:
            await self._peers.scheduler.MarkJobSaved(request, timeout=_SAVED_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not self._saved_unheard:
                log.warning("the scheduler does not hear of checkpoints of %s: %s", self.job, error.details())
            self._saved_unheard = True
        else:
            self._saved_unheard = False

    async def explain(self) -> str:
        """The scheduler's sentence about the job, for error messages."""
        try:
            answer = await self._peers.scheduler.ExplainJob(pb.ExplainJobRequest(name=self.job), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            return f"the scheduler answers {error.code().name}"
        return answer.sentence

    async def fleet_ready(self, waits: Waits, deadline: float) -> int:
        """Waits for all replicas; at the deadline one is enough. Returns their number. Raises StartTimedOut."""
        where = f" and to have a seat on the shared fleet {self._config.fleet.shared}" if self._seats else ""
        with waits.on("start", f"inference replicas to register with the gateway{where}"):
            while True:
                wanted = self._seats.wanted if self._seats else max(1, self._config.fleet.engines)
                ready = await self._ready_replicas()
                if ready >= wanted:
                    return ready
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(_POLL_SECONDS)
        if ready:
            log.warning("only %d of %d inference replicas are ready, going on", ready, wanted)
            return ready
        why = self._seats.why if self._seats else await self.explain()
        raise StartTimedOut(f"no inference replica registered with the gateway in time; {why}")

    async def _ready_replicas(self) -> int:
        request = gateway_pb.ListReplicasRequest(model_id=served_model(self._run, self._config))
        try:
            replicas = (await self._peers.gateway.ListReplicas(request, timeout=5.0)).replicas
        except grpc.aio.AioRpcError:
            return 0
        return sum(replica.state == replica_pb2.Replica.STATE_READY for replica in replicas)

    async def cancel(self) -> None:
        """Stops the processes and gives seats back; an error is logged, leases end both in the end."""
        if self._seats is not None:
            await self._seats.release()
        await cancel_job(self._peers, self.job)
