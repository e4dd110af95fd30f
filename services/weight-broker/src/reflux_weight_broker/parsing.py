"""Requests to values. `parse_*` return values or raise `InvalidRequest` with the field's name."""

import math
from collections.abc import Sequence
from typing import TypeVar

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_layout_pb2 as layout_pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_kit.errors import InvalidRequest
from reflux_kit.scope import ADAPTERS, run_of
from reflux_transfer.arenas.geometry import MAX_PACKINGS
from reflux_transfer.client.offer import Kind, SourceRegion
from reflux_transfer.client.wire import KINDS, MODES, from_region
from reflux_transfer.errors import WrongHandle
from reflux_transfer.handles import backend_of, unseal
from reflux_transfer.modes import Mode
from reflux_weight_broker.plan import Manifest, Tensors
from reflux_weight_broker.records import Registration, Report

T = TypeVar("T")

_MAX_NAME = 256
_MAX_TIMEOUT_SECONDS = 3600.0
_MAX_ADDRESS = 1 << 63
_MAX_EPOCH = 1 << 53  # Redis counts them in Lua numbers
_MAX_PROMPT = 65536

_OUTCOMES: dict[int, str] = {
    pb.AckVersionRequest.OUTCOME_PREPARED: "prepared",
    pb.AckVersionRequest.OUTCOME_COMMITTED: "committed",
    pb.AckVersionRequest.OUTCOME_FAILED: "failed",
}
_KINDS: dict[int, Kind] = {
    version_pb.WeightVersion.KIND_UNSPECIFIED: "full",
    **{number: kind for kind, number in KINDS.items()},
}
_MODES: dict[int, Mode] = {
    pb.UPDATE_MODE_UNSPECIFIED: "swap",
    **{number: mode for mode, number in MODES.items()},
}


def require_name(field: str, value: str) -> str:
    """A name of 1 to 256 characters."""
    if not 0 < len(value) <= _MAX_NAME:
        raise InvalidRequest(f"{field} must have 1 to {_MAX_NAME} characters, it has {len(value)}", field=field)
    return value


def require_count(field: str, value: int, limit: int = _MAX_ADDRESS) -> int:
    """An integer that is not negative and below a limit."""
    if not 0 <= value < limit:
        raise InvalidRequest(f"{field} must be at least 0 and below {limit}, it is {value}", field=field)
    return value


def require_epoch(field: str, value: int) -> int:
    """An epoch, 0 for none."""
    return require_count(field, value, _MAX_EPOCH)


def parse_register(request: pb.RegisterReplicaRequest, tensors: Tensors) -> tuple[str, Registration]:
    """Model id and rank; `tensors` are those of the named layout."""
    ranks = request.ranks or 1
    if ranks != tensors.ranks:
        raise InvalidRequest(f"ranks: the replica has {ranks} ranks, its layout {tensors.ranks}", field="ranks")
    registration = Registration(
        require_name("replica", request.replica),
        require_name("incarnation", request.incarnation),
        tensors,
        require_count("rank", request.rank, ranks),
        _choice("mode", request.mode, _MODES),
        require_epoch("epoch", request.epoch),
        require_count("version", request.version),
        request.fingerprint,
    )
    return require_name("model_id", request.model_id), registration


def parse_ack(request: pb.AckVersionRequest) -> tuple[str, Report]:
    """Model id and report."""
    outcome = _choice("outcome", request.outcome, _OUTCOMES)
    for field in ("transfer_seconds", "pause_ms"):
        value = getattr(request, field)
        if not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"{field} must be a number of at least 0, it is {value}", field=field)
    if request.epoch < 1:
        raise InvalidRequest(f"epoch must be at least 1, it is {request.epoch}", field="epoch")
    known = request.reason in pb.AckVersionRequest.Reason.values()
    reason = pb.AckVersionRequest.Reason.Name(request.reason) if known and request.reason else ""
    report = Report(
        require_name("replica", request.replica),
        request.incarnation,
        request.epoch,
        outcome,
        request.rank,
        request.error or "failed without a reason",
        reason.removeprefix("REASON_").lower(),
        request.bytes,
        request.transfer_seconds,
        request.pause_ms,
        request.fingerprint,
        parse_regions(request.regions, require_name("model_id", request.model_id)),
    )
    return request.model_id, report


def parse_manifest(request: pb.BeginVersionRequest, tensors: Tensors) -> Manifest:
    """What the publisher offers; `tensors` are those of the named layout."""
    model_id = require_name("model_id", request.model_id)
    kind = _choice("kind", request.kind, _KINDS)
    if kind == "adapter" and ADAPTERS not in model_id:
        raise InvalidRequest(
            f"kind: versions of kind ADAPTER are those of models <model>{ADAPTERS}<name>", field="kind"
        )
    if len(request.probe_token_ids) > _MAX_PROMPT:
        raise InvalidRequest(f"probe_token_ids: at most {_MAX_PROMPT} tokens", field="probe_token_ids")
    regions = parse_regions(request.regions, model_id)
    if [region.rank for region in regions] != list(range(tensors.ranks)):
        ranks = f"ranks {[region.rank for region in regions]}, the layout has {tensors.ranks} ranks"
        raise InvalidRequest(f"regions: every rank has one, in order; there are {ranks}", field="regions")
    return Manifest(
        model_id,
        require_count("version", request.version),
        require_name("request_id", request.request_id),
        tensors,
        regions,
        kind,
        require_epoch("base_epoch", request.base_epoch),
        parse_timeout(request),
        tuple(request.probe_token_ids),
    )


def parse_regions(offers: Sequence[layout_pb.RegionOffer], model_id: str) -> tuple[SourceRegion, ...]:
    """Regions that others may read: every handle is one of its transport and of the model's run."""
    for offer in offers:
        require_handle("regions", offer.handle, offer.transport, model_id)
        if len(offer.plans) > MAX_PACKINGS:
            text = f"regions: rank {offer.rank} packs for {len(offer.plans)} plans, at most {MAX_PACKINGS} are possible"
            raise InvalidRequest(text, field="regions")
        for plan in offer.plans:
            require_name("plans", plan)
    return tuple(from_region(offer) for offer in offers)


def require_handle(field: str, handle: bytes, transport: str, model_id: str) -> None:
    """A region handle of the transport that names no other run. A run's model is called like the run."""
    try:
        backend = backend_of(handle)
        if backend != transport:
            raise InvalidRequest(f"transport is {transport!r}, the handle is one of {backend}", field="transport")
        run, owner = unseal(handle, backend).get("run"), run_of(model_id)
    except WrongHandle as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    if run and run != owner:
        raise InvalidRequest(f"{field}: the handle belongs to run {run!r}, the model to {owner!r}", field=field)


def parse_timeout(request: pb.BeginVersionRequest) -> float:
    """Seconds that the replicas have to prepare, and again to commit."""
    seconds = request.sync_timeout_seconds
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        field = "sync_timeout_seconds"
        raise InvalidRequest(
            f"{field} must be above 0 and at most {_MAX_TIMEOUT_SECONDS:g}, it is {seconds}", field=field
        )
    return seconds


def parse_probe(request: pb.ReportProbeRequest) -> tuple[str, int, str, tuple[float, ...]]:
    """Model id, epoch, replica (empty for the learner) and log-probs."""
    replica = require_name("replica", request.replica) if request.replica else ""
    if not 0 < len(request.logprobs) <= _MAX_PROMPT:
        raise InvalidRequest(f"logprobs must have 1 to {_MAX_PROMPT} values", field="logprobs")
    epoch = require_epoch("epoch", request.epoch)
    return require_name("model_id", request.model_id), epoch, replica, tuple(request.logprobs)


def parse_paths(request: pb.ReportPathsRequest) -> pb.ReportPathsRequest:
    """The report itself: rates are numbers of at least 0."""
    require_name("process", request.process)
    for path in request.paths:
        require_name("transport", path.transport)
        if not math.isfinite(path.bytes_per_second) or path.bytes_per_second < 0:
            field = "bytes_per_second"
            raise InvalidRequest(f"{field} must be a number of at least 0, it is {path.bytes_per_second}", field=field)
    return request


def _choice(field: str, number: int, choices: dict[int, T]) -> T:
    if number not in choices:
        raise InvalidRequest(f"{field} has the unknown value {number}", field=field)
    return choices[number]
