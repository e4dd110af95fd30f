"""Protobuf messages of the gateway's and the engine's services to values and back."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1.engine_service_pb2 import KvTicket
from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.fleet import Ledger
from reflux_inference_gateway.replicas import Replica, ReplicaInfo, Role
from reflux_kit.errors import InvalidRequest

MAX_SAMPLES = 1024
_MAX_TOKENS = 1 << 20
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
_ID = re.compile(r"[\x21-\x7e]{1,256}")
_MAX_LEASE_SECONDS = 3600
_REPLICA_NAME = re.compile(r"replicas/[A-Za-z0-9._:-]{1,128}")
_ROLES = {ReplicaMessage.ROLE_BOTH: Role.BOTH, ReplicaMessage.ROLE_PREFILL: Role.PREFILL}
_ROLES[ReplicaMessage.ROLE_DECODE] = Role.DECODE


@dataclass(frozen=True)
class Handed:
    """A prompt that another replica has computed."""

    ticket: KvTicket
    pulled: Callable[[bool], None]
    """Called once, when the other replica's memory is not read any more; True when what was read is used."""


@dataclass(frozen=True, kw_only=True)
class GroupCall:
    """A checked GenerateGroup request; `sampling` stays a message, since it goes to the engine as it came."""

    request_id: str
    model_id: str
    prompt_token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    min_version: int = 0
    max_lag: int | None = None
    version: int | None = None
    session: str = ""
    group: str = ""
    continues: bool = False
    tenant: str = ""
    priority: int = 0
    whole_group: bool = False
    handed: Handed | None = None
    first_sample: int = 0
    """Index of the first sample, where the call is a part of a larger group: seeds and indexes count from there."""

    @property
    def num_tokens(self) -> int:
        """Upper bound of the tokens that the group costs a replica."""
        return len(self.prompt_token_ids) + self.num_samples * self.sampling.max_tokens

    def share(self, first: int, count: int) -> "GroupCall":
        """Samples `first .. first + count - 1` as a call of their own."""
        return replace(self, num_samples=count, first_sample=first)


def parse_group(request: gateway_pb.GenerateGroupRequest) -> GroupCall:
    """Checks a GenerateGroup request; raises InvalidRequest naming the field and the value."""
    if not request.model_id:
        raise InvalidRequest("model_id is required", field="model_id")
    if request.min_version < 0:
        raise InvalidRequest(f"min_version must be >= 0, got {request.min_version}", field="min_version")
    return GroupCall(
        request_id=parse_request_id(request.request_id),
        model_id=request.model_id,
        prompt_token_ids=parse_prompt(request.prompt_token_ids),
        num_samples=parse_num_samples(request.num_samples),
        sampling=parse_sampling(request.sampling),
        min_version=request.min_version,
        max_lag=request.max_lag if request.HasField("max_lag") else None,
        version=parse_version(request.version) if request.HasField("version") else None,
        session=parse_key(request.session, "session"),
        group=parse_key(request.group, "group"),
        continues=request.continues,
        tenant=parse_key(request.tenant, "tenant"),
        priority=request.priority,
        whole_group=request.whole_group,
    )


def parse_request_id(request_id: str) -> str:
    """1 to 256 visible ASCII characters."""
    if not _ID.fullmatch(request_id):
        raise InvalidRequest("request_id must be 1 to 256 visible ASCII characters", field="request_id")
    return request_id


def parse_version(version: int) -> int:
    """At least 0."""
    if version < 0:
        raise InvalidRequest(f"version must be >= 0, got {version}", field="version")
    return version


def parse_key(key: str, field: str) -> str:
    """Empty, or 1 to 256 visible ASCII characters."""
    if key and not _ID.fullmatch(key):
        raise InvalidRequest(f"{field} must be up to 256 visible ASCII characters", field=field)
    return key


def parse_abort(request: gateway_pb.AbortRequest) -> dict[str, str]:
    """The fields of an Abort request that are set; raises InvalidRequest when none is."""
    fields = {field.name: parse_key(value, field.name) for field, value in request.ListFields()}
    if not fields:
        raise InvalidRequest("one of request_id, session, group and run is required", field="request_id")
    return fields


def ledger_message(ledger: Ledger) -> gateway_pb.Ledger:
    """The counts as clients see them."""
    return gateway_pb.Ledger(**asdict(ledger))


def parse_prompt(token_ids: object) -> tuple[int, ...]:
    """At least one token id."""
    prompt = tuple(token_ids)  # pyright: ignore[reportArgumentType]
    if not prompt:
        raise InvalidRequest("prompt_token_ids must hold at least one id", field="prompt_token_ids")
    return prompt


def parse_num_samples(count: int) -> int:
    """1 to MAX_SAMPLES."""
    if not 1 <= count <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples must be 1 to {MAX_SAMPLES}, got {count}", field="num_samples")
    return count


def parse_sampling(sampling: SamplingParams) -> SamplingParams:
    """Finite numbers in range; the model's own limits are checked by the engine."""
    if not 1 <= sampling.max_tokens <= _MAX_TOKENS:
        raise InvalidRequest(
            f"sampling.max_tokens must be 1 to {_MAX_TOKENS}, got {sampling.max_tokens}", field="sampling.max_tokens"
        )
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 100):
        raise InvalidRequest(
            f"sampling.temperature must be 0 to 100, got {sampling.temperature}", field="sampling.temperature"
        )
    if not (math.isfinite(sampling.top_p) and 0 <= sampling.top_p <= 1):
        raise InvalidRequest(f"sampling.top_p must be 0 to 1, got {sampling.top_p}", field="sampling.top_p")
    if not (math.isfinite(sampling.min_p) and 0 <= sampling.min_p <= 1):
        raise InvalidRequest(f"sampling.min_p must be 0 to 1, got {sampling.min_p}", field="sampling.min_p")
    if len(sampling.stop_token_ids) > 64:
        raise InvalidRequest("sampling.stop_token_ids holds at most 64 ids", field="sampling.stop_token_ids")
    if len(sampling.stops) > _MAX_STOPS or not all(sampling.stops):
        raise InvalidRequest(f"sampling.stops holds at most {_MAX_STOPS} texts, none empty", field="sampling.stops")
    for name in ("top_logprobs", "prompt_logprobs"):
        if (count := getattr(sampling, name)) > _MAX_LOGPROBS:
            raise InvalidRequest(f"sampling.{name} must be 0 to {_MAX_LOGPROBS}, got {count}", field=f"sampling.{name}")
    return sampling


def parse_replica_name(name: str) -> str:
    """Format: replicas/{replica}."""
    if not _REPLICA_NAME.fullmatch(name):
        raise InvalidRequest(f"name must look like replicas/{{replica}}, got {name[:160]!r}", field="name")
    return name


def parse_lease(seconds: float) -> float:
    """How long a hold lasts: for ever when it is 0. Raises InvalidRequest."""
    if not 0 <= seconds <= _MAX_LEASE_SECONDS:
        raise InvalidRequest(
            f"lease_seconds must be from 0 to {_MAX_LEASE_SECONDS}, got {seconds}", field="lease_seconds"
        )
    return seconds or math.inf


def parse_replica(message: ReplicaMessage) -> ReplicaInfo:
    """A replica's description of itself; raises InvalidRequest naming the field."""
    if not message.model_id:
        raise InvalidRequest("replica.model_id is required", field="replica.model_id")
    if not (message.grpc_address or message.http_url):
        raise InvalidRequest("replica needs a grpc_address or an http_url", field="replica.grpc_address")
    if message.role not in _ROLES:
        raise InvalidRequest(f"replica.role must be set, got {message.role}", field="replica.role")
    return ReplicaInfo(
        name=parse_replica_name(message.name),
        model_id=message.model_id,
        grpc_address=message.grpc_address,
        http_url=message.http_url.rstrip("/"),
        role=_ROLES[message.role],
        version=message.version,
        epoch=message.epoch,
        sequences=message.sequences,
        pending_tokens=message.pending_tokens,
        capacity=message.capacity,
        node=message.node,
        run=message.run,
        engine=message.engine,
        fault=(message.health_reason or "unhealthy") if message.health == ReplicaMessage.HEALTH_UNHEALTHY else "",
    )


def replica_message(entry: Replica) -> ReplicaMessage:
    """The entry as clients see it; loads are the replica's own words."""
    message = info_message(entry.info)
    message.state = ReplicaMessage.State.Value(f"STATE_{entry.state.name}")
    return message


def info_message(info: ReplicaInfo) -> ReplicaMessage:
    """What a replica sends about itself."""
    return ReplicaMessage(
        name=info.name,
        model_id=info.model_id,
        grpc_address=info.grpc_address,
        http_url=info.http_url,
        role=ReplicaMessage.Role.Value(f"ROLE_{info.role.name}"),
        version=info.version,
        epoch=info.epoch,
        sequences=info.sequences,
        pending_tokens=info.pending_tokens,
        capacity=info.capacity,
        node=info.node,
        run=info.run,
        engine=info.engine,
        health=ReplicaMessage.HEALTH_UNHEALTHY if info.fault else ReplicaMessage.HEALTH_OK,
        health_reason=info.fault,
    )
