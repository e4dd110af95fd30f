"""What all jobs that the trainer asks the scheduler for have in common."""

import logging
from collections.abc import Mapping

import grpc

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_trainer.peers import Peers

log = logging.getLogger(__name__)

_MAX_RESTARTS = 5
_CPUS = {"learner": 0.25, "engine": 0.25, "rollout": 0.1}
_MODULES = {
    "learner": "reflux_trainer.learner.main",
    "engine": "reflux_inference_gateway.engine.main",
    "rollout": "reflux_trainer.rollout.main",
}
ENDED = (job_pb2.Job.STATE_FAILED, job_pb2.Job.STATE_CANCELLED, job_pb2.Job.STATE_SUCCEEDED)


async def is_alive(peers: Peers, job: str) -> bool:
    """Whether the scheduler knows the job and it has not ended. Raises AioRpcError when the scheduler is away."""
    try:
        answer = await peers.scheduler.GetJob(pb.GetJobRequest(name=job), timeout=10.0, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return False
        raise
    return answer.job.state not in ENDED


def role(name: str, kind: str, environment: Mapping[str, str], count: int = 1) -> job_pb2.RoleSpec:
    """A role `name` of `count` processes of a kind: "learner", "engine" or "rollout"."""
    return job_pb2.RoleSpec(
        role=name,
        count=count,
        resources=common_pb2.Resources(cpus=_CPUS[kind]),
        argv=["python", "-m", _MODULES[kind]],
        environment=[job_pb2.EnvironmentVariable(name=key, value=value) for key, value in environment.items()],
        max_restarts=_MAX_RESTARTS,
    )


async def cancel_job(peers: Peers, job: str) -> None:
    """Stops the processes of `job` ("" is none); a scheduler that refuses is logged, not raised."""
    if not job:
        return
    try:
        await peers.scheduler.CancelJob(pb.CancelJobRequest(name=job), timeout=15.0, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        log.warning("%s could not be cancelled: %s", job, error.details())
