"""Runs and events on the wire, as protos and as JSON."""

import re
from typing import Any

from google.protobuf.json_format import MessageToDict

from reflux.trainer.v1 import run_pb2
from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_runs.errors import ConfigError
from reflux_runs.translate import to_message
from reflux_trainer.journal import Event
from reflux_trainer.records import RunRecord
from reflux_trainer.store import Watched

_PREFIX = "runs/"
_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?")


def parse_run_id(text: str, field: str) -> str:
    """A run id. Raises InvalidRequest."""
    if not _RUN_ID.fullmatch(text):
        raise InvalidRequest(f"{field} {text[:80]!r} is not a run id; `reflux runs` lists them", field=field)
    return text


def parse_name(name: str) -> str:
    """The run id of "runs/{run}". Raises InvalidRequest."""
    if not name.startswith(_PREFIX):
        raise InvalidRequest(f'name {name[:80]!r} is not of the form "runs/{{run}}"', field="name")
    return parse_run_id(name.removeprefix(_PREFIX), "name")


def refused(error: ConfigError) -> InvalidRequest:
    """A refused configuration as the status of a call: first key in the metadata, everything in the text."""
    first = error.refusals[0]
    return InvalidRequest(str(error), field=first.key, value=str(first.value)[:200], works=first.works)


def render_run(record: RunRecord, step: int) -> run_pb2.Run:
    """The run as a message."""
    return run_pb2.Run(
        name=_PREFIX + record.run,
        state=run_pb2.Run.State.Value(f"STATE_{record.shown_state}"),
        config=to_message(record.config),
        step=step,
        message=record.message,
        created_at=record.created_at,
        ended_at=record.ended_at,
        attempt=record.attempt,
        job=record.job,
        folder=record.folder,
        forked_from=record.forked_from,
        tenant=record.tenant,
    )


def render_watched(watched: Watched) -> pb.WatchRunResponse:
    """One event; a mere change of state has no progress."""
    response = pb.WatchRunResponse(resume_token=watched.token, run=render_run(watched.record, watched.step))
    if watched.event.stage:
        response.progress.CopyFrom(_progress(watched.event))
    return response


def _progress(event: Event) -> run_pb2.Progress:
    return run_pb2.Progress(
        stage=event.stage,
        step=event.step,
        total_steps=event.total_steps,
        metrics=[run_pb2.Metric(name=name, value=value) for name, value in event.metrics.items()],
        at=event.at,
    )


def run_json(record: RunRecord, step: int) -> dict[str, Any]:
    """The run as JSON, the state without its prefix."""
    document = MessageToDict(
        render_run(record, step), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    config = record.config.model_dump(exclude_none=True)
    return document | {"state": record.shown_state, "config": config, "step": step, "attempt": record.attempt}
