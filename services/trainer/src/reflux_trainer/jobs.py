"""What all jobs that the trainer asks the scheduler for have in common."""

import logging

import grpc

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_trainer.peers import Peers

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
CPUS = {"learner": 0.25, "engine": 0.25, "rollout": 0.1}
MODULES = {
    "learner": "reflux_trainer.learner.main",
    "engine": "reflux_inference_gateway.engine.main",
    "rollout": "reflux_trainer.rollout.main",
}
ENDED = (job_pb2.Job.STATE_FAILED, job_pb2.Job.STATE_CANCELLED, job_pb2.Job.STATE_SUCCEEDED)


async def cancel_job(peers: Peers, job: str) -> None:
    """Stops the processes of `job` ("" is none); a scheduler that refuses is logged, not raised."""
    if not job:
        return
    try:
        await peers.scheduler.CancelJob(pb.CancelJobRequest(name=job), timeout=15.0, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        log.warning("%s could not be cancelled: %s", job, error.details())
