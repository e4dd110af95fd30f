"""From requests about adapters and datums to values; refusals as in `parsing`."""

from collections.abc import Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from reflux.checkpoint.v1.checkpoint_pb2 import StoredObject
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_model.config import ModelConfig
from reflux_model.lora import LoraSpec, TargetGroup
from reflux_trainer.learner.ops import CompletionData, GroupData
from reflux_trainer.learner.parsing import check_ids, parse_groups

_ARRAYS = ("weights", "advantages", "logprobs")
_MAX_RANK = 1024


def parse_lora(request: pb.CreateAdapterRequest) -> LoraSpec:
    """Rank and targets of an adapter."""
    if not 1 <= request.rank <= _MAX_RANK:
        raise InvalidRequest(f"rank must be from 1 to {_MAX_RANK}, got {request.rank}", field="rank")
    wanted: dict[TargetGroup, bool] = {
        "attention": request.train_attention,
        "mlp": request.train_mlp,
        "unembed": request.train_unembed,
    }
    groups: tuple[TargetGroup, ...] = tuple(group for group in wanted if wanted[group])
    if not groups:
        raise InvalidRequest("an adapter needs one of train_attention, train_mlp and train_unembed")
    return LoraSpec(rank=request.rank, groups=groups)


def parse_batch(request: pb.ForwardBackwardRequest | pb.ForwardRequest, config: ModelConfig) -> list[GroupData]:
    """The groups of a request, or its datums as groups of one completion each."""
    if bool(request.groups) == bool(request.datums):
        raise InvalidRequest("exactly one of groups and datums must hold the batch")
    if request.groups:
        return parse_groups(request.groups, config)
    return [_datum(f"datums[{index}]", datum, config) for index, datum in enumerate(request.datums)]


def parse_state_key(objects: "Sequence[StoredObject]", name: str, field: str = "objects") -> str:
    """The key of the one object of a state that ends in `name`."""
    keys = [stored.key for stored in objects if stored.key.endswith("/" + name)]
    if len(keys) != 1:
        raise InvalidRequest(f"{field} must hold exactly one {name}, found {len(keys)}", field=field)
    return keys[0]


def _datum(where: str, datum: pb.Datum, config: ModelConfig) -> GroupData:
    count = len(datum.token_ids)
    check_ids(f"{where}.token_ids", datum.token_ids, config)
    check_ids(f"{where}.target_token_ids", datum.target_token_ids, config)
    if len(datum.target_token_ids) != count:
        raise InvalidRequest(f"{where} has {len(datum.target_token_ids)} targets for {count} tokens")
    if count > config.max_positions:
        raise InvalidRequest(f"{where} has {count} tokens, the model takes {config.max_positions}")
    arrays = _arrays(where, datum.arrays, count)
    completion = CompletionData(
        token_ids=list(datum.target_token_ids),
        sampler_logprobs=arrays.get("logprobs", []),
        advantages=arrays.get("advantages", []),
        weights=arrays.get("weights", []),
        fed_ids=list(datum.token_ids[1:]),
    )
    return GroupData([datum.token_ids[0]], [completion])


def _arrays(where: str, arrays: "RepeatedCompositeFieldContainer[pb.FloatArray]", count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for array in arrays:
        if array.name not in _ARRAYS or array.name in found:
            raise InvalidRequest(f"{where}.arrays: {array.name!r} is not one of {', '.join(_ARRAYS)}, or there twice")
        if len(array.values) != count:
            raise InvalidRequest(f"{where}.arrays: {array.name} has {len(array.values)} entries for {count} targets")
        found[array.name] = list(array.values)
    return found
