"""Ids and addresses: `<session>:train:<n>`, `<session>:sample:<n>`, `<owner>:<seq>`, `tinker://<model>/<kind>/<name>`."""

import re
from dataclasses import dataclass
from typing import Literal

from reflux_kit.errors import InvalidRequest

Kind = Literal["training", "sampler"]
_SEGMENTS: dict[str, Kind] = {"weights": "training", "sampler_weights": "sampler"}
_OF_KIND = {kind: segment for segment, kind in _SEGMENTS.items()}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,127}")
_SCHEME = "tinker://"


def model_id(session: str, model_seq_id: int) -> str:
    """The SDK derives the same id for a model that is made by a load."""
    return f"{session}:train:{model_seq_id}"


def sampler_id(session: str, sampling_session_seq_id: int) -> str:
    """Id of a sampling session."""
    return f"{session}:sample:{sampling_session_seq_id}"


def is_sampler(owner: str) -> bool:
    """Whether an owner of futures is a sampling session, not a model."""
    return ":sample:" in owner


def adapter_name(model: str) -> str:
    """A model as the learner calls it; session ids have hexadecimal digits only."""
    return model.replace(":train:", "-t")


def request_id(owner: str, seq_id: int) -> str:
    """Id of the future of operation `seq_id` of a model or sampling session."""
    return f"{owner}:{seq_id}"


def split_request_id(text: str) -> tuple[str, int]:
    """Owner and sequence number of a request id. Raises `InvalidRequest`."""
    owner, _, seq_id = text.rpartition(":")
    if not owner or not (seq_id.isascii() and seq_id.isdigit()):
        raise InvalidRequest(f"request_id {text[:80]!r} is not one of ours", field="request_id")
    return owner, int(seq_id)


def checked_name(name: str | None, seq_id: int) -> str:
    """A checkpoint's name as clients choose it; without one the operation's number. Raises `InvalidRequest`."""
    if name is None:
        return f"{seq_id:06d}"
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"path {name[:80]!r} must have 1 to 128 of A-Z a-z 0-9 _ . = + @ - and no slash", field="path"
        )
    return name


@dataclass(frozen=True)
class CheckpointUri:
    """Where a checkpoint is found."""

    model: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """As the SDK names it inside its training run."""
        return f"{_OF_KIND[self.kind]}/{self.name}"


def parse_uri(text: str) -> CheckpointUri:
    """Reads `tinker://<model>/weights/<name>` or `.../sampler_weights/<name>`. Raises `InvalidRequest`."""
    parts = text.removeprefix(_SCHEME).split("/")
    if not text.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in _SEGMENTS or not _NAME.fullmatch(parts[2]):
        form = f"{_SCHEME}<model>/weights/<name> or {_SCHEME}<model>/sampler_weights/<name>"
        raise InvalidRequest(f"{text[:120]!r} is not of the form {form}", field="path")
    return CheckpointUri(parts[0], _SEGMENTS[parts[1]], parts[2])
