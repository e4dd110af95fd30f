"""What a token of one run may do, as a rule and through a real server."""

import time

import grpc
import jwt
import pytest

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import (
    CheckpointServiceServicer,
    CheckpointServiceStub,
    add_CheckpointServiceServicer_to_server,
)
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from reflux.scheduler.v1 import agent_service_pb2 as agent_pb
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from reflux.trainer.v1 import trainer_service_pb2 as trainer_pb
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker_pb
from reflux.weight_broker.v1 import weight_broker_service_pb2_grpc as broker_grpc
from reflux_kit import auth, scope
from reflux_kit.channel import open_channel
from reflux_kit.errors import PermissionDenied, Unauthenticated, reason_of
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings

SECRET = "a secret of the stack, long enough"
GATEWAY = "/reflux.inference_gateway.v1.InferenceGatewayService/"
TRAINER = "/reflux.trainer.v1.TrainerService/"
BROKER = "/reflux.weight_broker.v1.WeightBrokerService/"
CHECKPOINT = "/reflux.checkpoint.v1.CheckpointService/"
SANDBOX = "/reflux.sandbox.v1.SandboxService/"


def batch(*runs):
    requests = [sandbox_pb.CreateVerificationRequest(run=run) for run in runs]
    return sandbox_pb.BatchCreateVerificationsRequest(requests=requests)


ALLOWED = [
    (TRAINER + "RegisterLearner", trainer_pb.RegisterLearnerRequest(run="mine")),
    (GATEWAY + "GenerateGroup", gateway_pb.GenerateGroupRequest(model_id="mine")),
    (GATEWAY + "RegisterReplica", gateway_pb.RegisterReplicaRequest(replica=Replica(model_id="mine", run="mine"))),
    (GATEWAY + "DeregisterReplica", gateway_pb.DeregisterReplicaRequest(name="replicas/x")),
    (GATEWAY + "PauseFleet", gateway_pb.PauseFleetRequest(model_id="mine")),
    (GATEWAY + "SetTraffic", gateway_pb.SetTrafficRequest(traffic=gateway_pb.Traffic(model_id="mine"))),
    (GATEWAY + "Abort", gateway_pb.AbortRequest(run="mine", group="g7")),
    (BROKER + "RegisterReplica", broker_pb.RegisterReplicaRequest(replica="r", model_id="mine")),
    (BROKER + "BeginVersion", broker_pb.BeginVersionRequest(model_id="mine/adapters/a")),
    (CHECKPOINT + "GetCheckpoint", checkpoint_pb.GetCheckpointRequest(name="checkpoints/mine/7")),
    (SANDBOX + "BatchCreateVerifications", batch("mine", "mine")),
    (SANDBOX + "ListDeadLetters", sandbox_pb.ListDeadLettersRequest(run="mine")),
]
REFUSED = [
    ("/reflux.scheduler.v1.SchedulerService/GetTopology", scheduler_pb.GetTopologyRequest()),
    ("/reflux.scheduler.v1.AgentService/ListRoles", agent_pb.ListRolesRequest()),
    (TRAINER + "ListRuns", trainer_pb.ListRunsRequest()),
    (TRAINER + "CancelRun", trainer_pb.CancelRunRequest(name="runs/mine")),
    (TRAINER + "RegisterLearner", trainer_pb.RegisterLearnerRequest(run="other")),
    (GATEWAY + "GenerateGroup", gateway_pb.GenerateGroupRequest(model_id="other")),
    (GATEWAY + "RegisterReplica", gateway_pb.RegisterReplicaRequest(replica=Replica(model_id="other"))),
    (GATEWAY + "Heartbeat", gateway_pb.HeartbeatRequest(replica=Replica(model_id="mine", run="other"))),
    (GATEWAY + "PauseFleet", gateway_pb.PauseFleetRequest()),
    (GATEWAY + "SetTraffic", gateway_pb.SetTrafficRequest(traffic=gateway_pb.Traffic(model_id="other"))),
    (GATEWAY + "Abort", gateway_pb.AbortRequest(group="g7")),
    (BROKER + "BeginVersion", broker_pb.BeginVersionRequest(model_id="other")),
    (BROKER + "BeginVersion", broker_pb.BeginVersionRequest(model_id="mine2/adapters/a")),
    (TRAINER + "RegisterLearner", trainer_pb.RegisterLearnerRequest(run="mine/adapters/a")),
    (CHECKPOINT + "AbortCheckpoint", checkpoint_pb.AbortCheckpointRequest(name="checkpoints/other/7")),
    (CHECKPOINT + "ListCheckpoints", checkpoint_pb.ListCheckpointsRequest(run="mine2")),
    (SANDBOX + "BatchCreateVerifications", batch("mine", "other")),
    (SANDBOX + "CancelVerifications", sandbox_pb.CancelVerificationsRequest(run="other")),
    (SANDBOX + "ListDeadLetters", sandbox_pb.ListDeadLettersRequest()),
    (SANDBOX + "ClaimVerifications", sandbox_pb.ClaimVerificationsRequest(verifier="external/x")),
]


@pytest.mark.parametrize(("method", "request_"), ALLOWED)
def test_a_runs_token_serves_its_own_processes(method, request_):
    scope.check(method, request_, "mine")


@pytest.mark.parametrize(("method", "request_"), REFUSED)
def test_a_runs_token_reaches_no_other_run_and_no_operators_call(method, request_):
    with pytest.raises(PermissionDenied, match="mine"):
        scope.check(method, request_, "mine")


def test_an_adapter_belongs_to_the_run_of_its_model():
    assert scope.run_of("run/adapters/x") == scope.run_of("run") == "run"


def test_a_signed_token_without_a_scope_opens_nothing():
    bare = jwt.encode({"sub": "somebody", "exp": time.time() + 60}, auth._key(SECRET), algorithm="HS256")
    with pytest.raises(Unauthenticated, match="MissingRequiredClaim"):
        auth.verify(SECRET, bare)


class Checkpoints(CheckpointServiceServicer):
    async def GetLatestCheckpoint(self, request, context):
        return checkpoint_pb.GetLatestCheckpointResponse()

    async def ListCheckpoints(self, request, context):
        return checkpoint_pb.ListCheckpointsResponse()


async def test_the_server_enforces_the_scope_of_tokens_and_lets_the_stack_through():
    name = checkpoint_pb.DESCRIPTOR.services_by_name["CheckpointService"].full_name
    service = Service((Mount(Checkpoints(), add_CheckpointServiceServicer_to_server, name),))
    settings = ServiceSettings(stack_secret=SECRET, drain_seconds=0)
    of_run = ServiceSettings(token=auth.mint(SECRET, "rollout", run="mine"))
    async with (
        running(service, settings) as bound,
        open_channel(bound.grpc, of_run) as narrow,
        open_channel(bound.grpc, settings) as wide,
    ):
        mine = checkpoint_pb.GetLatestCheckpointRequest(run="mine")
        other = checkpoint_pb.GetLatestCheckpointRequest(run="other")
        await CheckpointServiceStub(narrow).GetLatestCheckpoint(mine)
        await CheckpointServiceStub(wide).GetLatestCheckpoint(other)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await CheckpointServiceStub(narrow).GetLatestCheckpoint(other)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


class Layouts(broker_grpc.WeightBrokerServiceServicer):
    async def PutLayout(self, request_iterator, context):
        return broker_pb.PutLayoutResponse(hash=b"".join([part.chunk async for part in request_iterator]).decode())


async def test_uploads_carry_a_token_and_are_decoded_like_every_other_call():
    name = broker_pb.DESCRIPTOR.services_by_name["WeightBrokerService"].full_name
    service = Service((Mount(Layouts(), broker_grpc.add_WeightBrokerServiceServicer_to_server, name),))
    settings = ServiceSettings(stack_secret=SECRET, drain_seconds=0)
    parts = [broker_pb.PutLayoutRequest(chunk=chunk) for chunk in (b"ab", b"c")]
    async with (
        running(service, settings) as bound,
        open_channel(bound.grpc, settings) as known,
        open_channel(bound.grpc, ServiceSettings()) as stranger,
    ):
        answer = await broker_grpc.WeightBrokerServiceStub(known).PutLayout(iter(parts))
        assert answer.hash == "abc"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker_grpc.WeightBrokerServiceStub(stranger).PutLayout(iter(parts))
        raw = known.stream_unary(BROKER + "PutLayout", request_serializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as garbled:
            await raw(iter([b"\xff\xff"]))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert garbled.value.code() is grpc.StatusCode.INVALID_ARGUMENT
