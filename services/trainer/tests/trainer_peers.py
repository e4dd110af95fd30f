"""Peers that speak the real protocols in this process: learner, gateway, sandbox, broker, checkpoint, scheduler."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import grpc

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint
from reflux.checkpoint.v1 import checkpoint_service_pb2_grpc as checkpoint_grpc
from reflux.common.v1 import common_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway
from reflux.inference_gateway.v1 import inference_gateway_service_pb2_grpc as gateway_grpc
from reflux.inference_gateway.v1 import replica_pb2
from reflux.sandbox.v1 import sandbox_service_pb2 as sandbox
from reflux.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc
from reflux.sandbox.v1 import verification_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler
from reflux.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from reflux.trainer.v1 import learner_service_pb2 as learner
from reflux.trainer.v1 import learner_service_pb2_grpc as learner_grpc
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker
from reflux.weight_broker.v1 import weight_broker_service_pb2_grpc as broker_grpc
from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings


class Learner(learner_grpc.LearnerServiceServicer):
    """Counts instead of computing; keeps the contract of op_id. `incarnation` changes with each new object."""

    def __init__(self, name="learner-1", fleet=None):
        self.incarnation = name
        self.fleet = fleet
        self.model_id, self.op_id, self.version = "", 0, 0
        self.adapter = ""
        self.done, self.batches = [], []
        self.publish_failures = 0
        self.publish_codes, self.publish_ids, self.publish_seconds = [], [], 0.0
        self.probes = []
        self.damaged = set()
        self.hold = None

    async def CreateModel(self, request, context):
        self.model_id, self.op_id, self.version, self.adapter = request.model_id, 0, 0, ""
        self.done.append("create")
        return learner.CreateModelResponse(num_parameters=1)

    async def CreateAdapter(self, request, context):
        self.adapter = request.adapter
        self.done.append(f"adapter of rank {request.rank}")
        return learner.CreateAdapterResponse(num_parameters=1)

    async def LoadState(self, request, context):
        if request.objects[0].checksum in self.damaged:
            raise WrongState("the object is damaged")
        if request.adapter and request.model_id != self.model_id:
            raise NotFound("no model is loaded")
        self.model_id, self.adapter = request.model_id, request.adapter
        self.op_id, self.version = json.loads(request.objects[0].checksum)
        self.done.append(f"load {self.op_id}")
        return learner.LoadStateResponse(op_id=self.op_id, version=self.version)

    async def GetLearner(self, request, context):
        if self.adapter:
            state = learner.AdapterState(name=self.adapter, op_id=self.op_id, version=self.version)
            return learner.GetLearnerResponse(model_id=self.model_id, incarnation=self.incarnation, adapters=[state])
        return learner.GetLearnerResponse(
            model_id=self.model_id, op_id=self.op_id, version=self.version, incarnation=self.incarnation
        )

    def _operate(self, request):
        if request.model_id != self.model_id:
            raise NotFound("no model is loaded")
        if request.adapter != self.adapter:
            raise NotFound(f"the operation is for {request.adapter!r}, not {self.adapter!r}")
        if request.op_id > self.op_id + 1:
            raise WrongState(f"operation {request.op_id} after {self.op_id}")
        new = request.op_id == self.op_id + 1
        self.op_id = max(self.op_id, request.op_id)
        if new:
            self.done.append(request.op_id)
        return new

    async def ForwardBackward(self, request, context):
        if self.hold is not None:
            await self.hold.wait()
        if self._operate(request):
            self.batches.append(request)
        tokens = sum(len(each.token_ids) for group in request.groups for each in group.completions)
        return learner.ForwardBackwardResponse(loss=0.5, tokens=tokens, entropy=1.0, seconds=0.001)

    async def OptimStep(self, request, context):
        self.version += self._operate(request)
        return learner.OptimStepResponse(grad_norm=1.0, version=self.version, applied=True, seconds=0.001)

    async def PublishWeights(self, request, context):
        self.publish_ids.append(request.request_id)
        self.probes.append(tuple(request.probe_token_ids))
        self.publish_seconds = context.time_remaining()
        if self.publish_codes:
            await context.abort(self.publish_codes.pop(), "as the test wants it")
        if self.publish_failures:
            self.publish_failures -= 1
            raise WrongState("replica r0 refused: checksum mismatch")
        if self.fleet is not None:
            self.fleet.version = self.version
        return learner.PublishWeightsResponse(version=self.version, epoch=self.version + 100, sync_seconds=0.01)

    async def SaveState(self, request, context):
        state = json.dumps([self.op_id, self.version])
        stored = checkpoint_pb2.StoredObject(key=request.prefix + "/state", size_bytes=1, checksum=state)
        return learner.SaveStateResponse(objects=[stored], op_id=self.op_id, version=self.version)


class UnknownModel(NotFound):
    reason = "UNKNOWN_MODEL"


class Gateway(gateway_grpc.InferenceGatewayServiceServicer):
    """Answers any prompt; sample i says token 3 + i. `outages` calls fail first. `scores`, a function of prompt and
    answers, gives their log-probs."""

    def __init__(self):
        self.engine = ""
        """Address of the only replica, if there is one that is called itself."""
        self.scores = None
        self.version = 0
        self.outages = 0
        self.unknown = 0
        self.poison = set()
        self.requests = Counter()
        self.hold = None

    async def GenerateGroup(self, request, context):
        self.requests[tuple(request.prompt_token_ids)] += 1
        if request.min_version > self.version:
            raise WrongState("no replica is new enough")
        if tuple(request.prompt_token_ids) in self.poison:
            raise InvalidRequest("the prompt exceeds the context")
        if self.unknown:
            self.unknown -= 1
            raise UnknownModel("no replica of this model is registered")
        if self.outages:
            self.outages -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        if self.hold is not None:
            await self.hold.wait()
        answers = [[3 + index, 1] for index in range(request.num_samples)]
        logprobs = [[-0.5, -0.5]] * len(answers)
        if self.scores is not None:
            logprobs = self.scores(list(request.prompt_token_ids), answers)
        for index, token_ids in enumerate(answers):
            yield gateway.GenerateGroupResponse(
                sample=common_pb2.Sample(
                    index=index,
                    token_ids=token_ids,
                    logprobs=logprobs[index],
                    finish_reason="stop",
                    versions=[common_pb2.VersionSpan(version=self.version, start=0, end=2)],
                ),
                replica="replicas/r0",
            )

    async def ListReplicas(self, request, context):
        ready = replica_pb2.Replica.STATE_READY
        return gateway.ListReplicasResponse(
            replicas=[
                replica_pb2.Replica(name=f"replicas/r{each}", state=ready, grpc_address=self.engine)
                for each in range(1 if self.engine else 4)
            ]
        )


class Sandbox(sandbox_grpc.SandboxServiceServicer):
    """Even answers are right; jobs end at once on the stream, or with the poll when `silent`."""

    def __init__(self):
        self.jobs = {}
        self.created = Counter()
        self.watchers = []
        self.silent = False
        self.ungraded = 0
        self.hold = None

    async def CreateVerification(self, request, context):
        if self.hold is not None:
            await self.hold.wait()
        name = f"verifications/{request.request_id}"
        self.created[name] += 1
        if name in self.jobs:
            return sandbox.CreateVerificationResponse(verification=self.jobs[name])
        self.jobs[name] = verification_pb2.Verification(
            name=name,
            state=verification_pb2.Verification.STATE_ENDED,
            grades=[
                verification_pb2.Grade(outcome=verification_pb2.Grade.OUTCOME_SCORED, reward=float(index % 2))
                for index in range(len(request.answers))
            ],
        )
        if self.ungraded and len(request.answers) == 1:  # held-out answers come one by one
            self.ungraded -= 1
            grade = verification_pb2.Grade(
                outcome=verification_pb2.Grade.OUTCOME_INFRA_ERROR, message="no child is ready"
            )
            self.jobs[name].grades[0].CopyFrom(grade)
        if not self.silent:
            for watcher in self.watchers:
                watcher.put_nowait(self.jobs[name])
        return sandbox.CreateVerificationResponse(
            verification=verification_pb2.Verification(name=name, state=verification_pb2.Verification.STATE_QUEUED)
        )

    async def GetVerification(self, request, context):
        return sandbox.GetVerificationResponse(verification=self.jobs[request.name])

    async def WatchVerifications(self, request, context):
        jobs = asyncio.Queue()
        self.watchers.append(jobs)
        try:
            while True:
                yield sandbox.WatchVerificationsResponse(verification=await jobs.get(), resume_token="1")
        finally:
            self.watchers.remove(jobs)


class Checkpoints(checkpoint_grpc.CheckpointServiceServicer):
    """A catalog in memory."""

    def __init__(self):
        self.committed = []
        self.damaged = set()
        self.scrubbed = []
        self.store_url = "file:///none"
        self.away = False
        self.taken = False

    async def BeginCheckpoint(self, request, context):
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the object store is away")
        if self.taken:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "committed already")
        made = checkpoint_pb2.Checkpoint(
            name=f"checkpoints/{request.run}/{request.step}",
            run=request.run,
            step=request.step,
            attempt=request.attempt,
        )
        return checkpoint.BeginCheckpointResponse(checkpoint=made, store_url=self.store_url, prefix=made.name)

    async def CommitCheckpoint(self, request, context):
        made = checkpoint_pb2.Checkpoint(
            name=request.name,
            run=request.name.split("/")[1],
            store_url=self.store_url,
            objects=request.objects,
            cursor=request.cursor,
            attempt=1,
        )
        self.committed.append(made)
        return checkpoint.CommitCheckpointResponse(checkpoint=made)

    async def ScrubCheckpoint(self, request, context):
        self.scrubbed.append(request.name)
        keys = ["p/state"] if request.name in self.damaged else []
        self.committed = [made for made in self.committed if made.name not in self.damaged]
        return checkpoint.ScrubCheckpointResponse(damaged_keys=keys)

    async def GetCheckpoint(self, request, context):
        found = [made for made in self.committed if made.name == request.name]
        if not found:
            raise NotFound("no such checkpoint")
        return checkpoint.GetCheckpointResponse(checkpoint=found[0])

    async def GetLatestCheckpoint(self, request, context):
        found = [made for made in self.committed if made.run == request.run]
        if not found:
            raise NotFound("no committed checkpoint")
        return checkpoint.GetLatestCheckpointResponse(checkpoint=found[-1])


class Broker(broker_grpc.WeightBrokerServiceServicer):
    async def ListReplicas(self, request, context):
        return broker.ListReplicasResponse()


class Scheduler(scheduler_grpc.SchedulerServiceServicer):
    """Runs nothing; `end` lets the job fail."""

    def __init__(self):
        self.job = job_pb2.Job(name="jobs/j1", state=job_pb2.Job.STATE_RUNNING)
        self.changed = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.created = asyncio.Event()
        self.place = None
        self.hold = None
        self.roles, self.request_ids = [], []
        self.saved = []
        self.save_hold = None
        self.save_code = None
        self.nodes = []

    async def GetTopology(self, request, context):
        return scheduler.GetTopologyResponse(nodes=self.nodes)

    def end(self, message):
        self.job.state, self.job.message = job_pb2.Job.STATE_FAILED, message
        self.changed.set()

    async def CreateJob(self, request, context):
        if self.place is not None:
            await self.place.wait()
        self.roles = list(request.roles)
        self.request_ids.append(request.request_id)
        self.created.set()
        return scheduler.CreateJobResponse(job=self.job)

    async def GetJob(self, request, context):
        return scheduler.GetJobResponse(job=self.job)

    async def CancelJob(self, request, context):
        self.cancelled.set()
        if self.hold is not None:
            await self.hold.wait()
        return scheduler.CancelJobResponse(job=self.job)

    async def MarkJobSaved(self, request, context):
        self.saved.append(request.name)
        if self.save_hold is not None:
            await self.save_hold.wait()
        if self.save_code is not None:
            await context.abort(self.save_code, "as the test wants it")
        return scheduler.MarkJobSavedResponse(job=self.job)

    async def ExplainJob(self, request, context):
        return scheduler.ExplainJobResponse(sentence="all members run")

    async def WatchJob(self, request, context):
        yield scheduler.WatchJobResponse(job=self.job, resume_token="1")
        await self.changed.wait()
        yield scheduler.WatchJobResponse(job=self.job, resume_token="2")
        await asyncio.Event().wait()


_MOUNTS = {
    Learner: (learner_grpc.add_LearnerServiceServicer_to_server, "reflux.trainer.v1.LearnerService"),
    Gateway: (gateway_grpc.add_InferenceGatewayServiceServicer_to_server, "reflux.inference_gateway.v1.X"),
    Sandbox: (sandbox_grpc.add_SandboxServiceServicer_to_server, "reflux.sandbox.v1.X"),
    Checkpoints: (checkpoint_grpc.add_CheckpointServiceServicer_to_server, "reflux.checkpoint.v1.X"),
    Broker: (broker_grpc.add_WeightBrokerServiceServicer_to_server, "reflux.weight_broker.v1.X"),
    Scheduler: (scheduler_grpc.add_SchedulerServiceServicer_to_server, "reflux.scheduler.v1.X"),
}


@asynccontextmanager
async def serving(*servicers):
    """All servicers on one address."""
    mounts = tuple(Mount(each, *_MOUNTS[type(each)]) for each in servicers)
    async with running(Service(mounts), ServiceSettings(drain_seconds=0)) as bound:
        yield bound.grpc
