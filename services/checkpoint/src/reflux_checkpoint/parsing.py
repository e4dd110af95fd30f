"""Messages in, frozen values out, and back."""

from collections.abc import Callable
from typing import TypeVar

from reflux.checkpoint.v1 import checkpoint_pb2 as messages
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux_checkpoint.catalog import Record, State
from reflux_checkpoint.manifest import (
    CheckpointId,
    Cursor,
    StoredObject,
    check_cursor,
    check_objects,
    check_run,
    make_id,
    parse_name,
)
from reflux_kit.errors import InvalidRequest

Parsed = TypeVar("Parsed")
_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_STATES = {
    State.OPEN: messages.Checkpoint.STATE_OPEN,
    State.COMMITTED: messages.Checkpoint.STATE_COMMITTED,
    State.ABORTED: messages.Checkpoint.STATE_ABORTED,
    State.DAMAGED: messages.Checkpoint.STATE_DAMAGED,
}


def parse_begin(request: pb.BeginCheckpointRequest) -> CheckpointId:
    """The id that this request has every time it is sent."""
    if not request.request_id or len(request.request_id) > 200:
        raise InvalidRequest("request_id: want a UUID of the client's choice (1-200 characters)")
    return _valid(lambda: make_id(request.run, request.attempt, request.step, request.request_id))


def parse_id(name: str) -> CheckpointId:
    """A resource name."""
    return _valid(lambda: parse_name(name))


def parse_run(run: str) -> str:
    """The name of one run."""
    return _valid(lambda: check_run(run))


def parse_commit(request: pb.CommitCheckpointRequest) -> tuple[CheckpointId, tuple[StoredObject, ...], Cursor]:
    """Id, objects and cursor of a commit."""
    id = parse_id(request.name)
    if not request.HasField("cursor"):
        raise InvalidRequest("cursor: required, a state without its place in the loop cannot be resumed")
    objects = tuple(StoredObject(item.key, item.size_bytes, item.checksum) for item in request.objects)
    found = request.cursor
    cursor = Cursor(
        step=found.step,
        warmup_step=found.warmup_step,
        version=found.version,
        epoch=found.epoch,
        next_prompt_index=found.next_prompt_index,
        low_water_index=found.low_water_index,
        closed_prompts=tuple(sorted(found.closed_prompts)),
        op_id=found.op_id,
        dataset_fingerprint=found.dataset_fingerprint,
    )
    _valid(lambda: check_objects(id.data_prefix, objects))
    _valid(lambda: check_cursor(cursor))
    return id, objects, cursor


def parse_list(request: pb.ListCheckpointsRequest) -> tuple[str, int, CheckpointId | None]:
    """Run ("" for all), page size, and the last checkpoint of the page before."""
    run = parse_run(request.run) if request.run else ""
    after = parse_id(request.page_token) if request.page_token else None
    return run, min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE), after


def to_message(record: Record, store_url: str) -> messages.Checkpoint:
    """A record as clients see it."""
    message = messages.Checkpoint(
        name=record.id.name,
        run=record.id.run,
        step=record.id.step,
        attempt=record.id.attempt,
        state=_STATES[record.state],
        store_url=store_url,
        prefix=record.id.data_prefix,
    )
    if record.manifest is not None:
        message.committed_at = record.manifest.committed_at
        for item in record.manifest.objects:
            message.objects.add(key=item.key, size_bytes=item.size_bytes, checksum=item.checksum)
        cursor = record.manifest.cursor
        message.cursor.CopyFrom(
            messages.LoopCursor(
                step=cursor.step,
                warmup_step=cursor.warmup_step,
                version=cursor.version,
                epoch=cursor.epoch,
                next_prompt_index=cursor.next_prompt_index,
                low_water_index=cursor.low_water_index,
                closed_prompts=cursor.closed_prompts,
                op_id=cursor.op_id,
                dataset_fingerprint=cursor.dataset_fingerprint,
            )
        )
    return message


def _valid(parse: Callable[[], Parsed]) -> Parsed:
    try:
        return parse()
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
