"""Divisions of traffic: messages to values and back."""

import math

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway.division import Arm, Division
from reflux_inference_gateway.policy.traffic import CanaryLimits
from reflux_inference_gateway.wire import parse_replica_name, parse_version
from reflux_kit.errors import InvalidRequest

_MAX_ARMS = 64
_MAX_NAME = 128


def parse_traffic(request: pb.SetTrafficRequest) -> Division | None:
    """The division that a SetTraffic request asks for, None when it lifts it; raises InvalidRequest."""
    traffic = request.traffic
    if not traffic.model_id:
        raise InvalidRequest("traffic.model_id is required", field="traffic.model_id")
    if len(traffic.arms) > _MAX_ARMS:
        raise InvalidRequest(f"traffic.arms holds at most {_MAX_ARMS}", field="traffic.arms")
    arms = [_arm(message) for message in traffic.arms]
    try:
        division = Division(arms, traffic.canary, _limits(request.limits))
    except ValueError as error:
        raise InvalidRequest(str(error), field="traffic") from error
    return division if arms else None


def traffic_message(model_id: str, division: Division | None) -> pb.Traffic:
    """The division as it is now."""
    if division is None:
        return pb.Traffic(model_id=model_id)
    weights = division.traffic.weights
    arms = [
        pb.TrafficArm(
            name=arm.name,
            weight=weights[arm.name],
            version=arm.version,
            run=arm.run,
            engine=arm.engine,
            replicas=arm.replicas,
        )
        for arm in division.arms
    ]
    rolled_back = division.traffic.rolled_back
    return pb.Traffic(model_id=model_id, arms=arms, canary=division.canary, rolled_back=rolled_back)


def _arm(message: pb.TrafficArm) -> Arm:
    if not 0 < len(message.name) <= _MAX_NAME:
        raise InvalidRequest(f"traffic.arms.name must have 1 to {_MAX_NAME} characters", field="traffic.arms.name")
    if not (math.isfinite(message.weight) and message.weight >= 0):
        raise InvalidRequest(
            f"traffic.arms.weight must be at least 0, got {message.weight}", field="traffic.arms.weight"
        )
    return Arm(
        name=message.name,
        weight=message.weight,
        version=parse_version(message.version) if message.HasField("version") else None,
        run=message.run,
        engine=message.engine,
        replicas=tuple(parse_replica_name(name) for name in message.replicas),
    )


def _limits(message: pb.CanaryLimits) -> CanaryLimits:
    usual = CanaryLimits()
    return CanaryLimits(
        error_rate=message.error_rate or usual.error_rate,
        good_error_rate=message.good_error_rate or usual.good_error_rate,
    )
