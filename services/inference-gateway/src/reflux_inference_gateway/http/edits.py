"""The declared edits of a body on its way to a replica; everything else goes as it came. Pure.

| edit | for engines | field | when |
|---|---|---|---|
| salt `weight-version:<at the trajectory's start>` | vllm, sglang | `cache_salt`, `extra_key` | `X-Reflux-Session` |

A salt parts the engine's prefix cache by weight version, so that no keys and values of older weights are reused by a
trajectory that began under newer ones. A salt of the client's own stays a part of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from reflux_inference_gateway.http.headers import Body

_SALT_FIELDS = {"vllm": "cache_salt", "sglang": "extra_key"}


@dataclass(frozen=True)
class Edit:
    """A top-level field that the gateway sets; what the client sent there is kept behind a slash."""

    field: str
    value: str


def salt(engine: str, version: int) -> tuple[Edit, ...]:
    """The edit that parts the prefix cache of an engine by the version at a trajectory's start; none for others."""
    field = _SALT_FIELDS.get(engine)
    return (Edit(field, f"weight-version:{version}"),) if field else ()


def apply(body: Body, fields: Mapping[str, object], edits: tuple[Edit, ...]) -> Body:
    """Returns the JSON object `body`, whose parsed form is `fields`, with the edits made.

    A new field is put in front without touching another byte; only a body that has the field already is written anew.
    """
    if not edits:
        return body
    if any(edit.field in fields for edit in edits):
        return _written_anew(body, edits)
    added = ",".join(f"{json.dumps(edit.field)}:{json.dumps(edit.value)}" for edit in edits).encode()
    start = body.index(b"{") + 1
    return b"".join((body[:start], added, b"," if fields else b"", body[start:]))


def _written_anew(body: Body, edits: tuple[Edit, ...]) -> bytes:
    fields = json.loads(body)
    for edit in edits:
        sent = fields.get(edit.field)
        fields[edit.field] = edit.value if sent is None else f"{edit.value}/{sent}"
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
