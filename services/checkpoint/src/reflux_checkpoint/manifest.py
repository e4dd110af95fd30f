"""What a checkpoint is: its id, its keys, and the manifest whose existence makes it one.

    checkpoints/begun/{run}/{id}          a writer announced itself; open -> committing | aborted (compare-and-swap)
    checkpoints/data/{run}/{id}/...       its objects
    checkpoints/manifests/{run}/{order}   exists = committed; create-only, so one per (attempt, step)
    checkpoints/scrubs/{run}/{id}         the last full read-back
    checkpoints/fences/{run}              the highest attempt that began

`order` sorts by (attempt, step): the history of a later attempt always beats that of an earlier one, so a writer that
was replaced and did not notice cannot become the newest checkpoint, whatever it manages to write.
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

ROOT = "checkpoints"
MAX_ATTEMPT = 10**6 - 1
MAX_STEP = 10**10 - 1
_FORMAT = 1
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_ID = re.compile(r"(\d{6})-(\d{10})-([0-9a-f]{16})")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


class DamagedRecord(ValueError):
    """A record of ours in the store is not what we wrote."""


@dataclass(frozen=True)
class CheckpointId:
    """A checkpoint's place in the order of its run, and the writer's request."""

    run: str
    attempt: int
    step: int
    request: str

    @property
    def key(self) -> str:
        """The last segment of the name, unique in the run."""
        return f"{self.order}-{self.request}"

    @property
    def order(self) -> str:
        """Sorts as (attempt, step)."""
        return f"{self.attempt:06d}-{self.step:010d}"

    @property
    def name(self) -> str:
        """Resource name: checkpoints/{run}/{id}."""
        return f"checkpoints/{self.run}/{self.key}"

    @property
    def data_prefix(self) -> str:
        """Prefix of all objects, without a slash at the end."""
        return f"{ROOT}/data/{self.run}/{self.key}"

    @property
    def begun_key(self) -> str:
        """Key of the writer's announcement."""
        return f"{ROOT}/begun/{self.run}/{self.key}"

    @property
    def manifest_key(self) -> str:
        """Key of the manifest; the same for every writer of this attempt and step."""
        return f"{ROOT}/manifests/{self.run}/{self.order}"

    @property
    def scrub_key(self) -> str:
        """Key of the last read-back."""
        return f"{ROOT}/scrubs/{self.run}/{self.key}"


@dataclass(frozen=True)
class StoredObject:
    """An object of a checkpoint; `checksum` is xxh3_128 in hexadecimal."""

    key: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Cursor:
    """Where the training loop stands; fields as in reflux.checkpoint.v1.LoopCursor."""

    step: int
    warmup_step: int
    version: int
    epoch: int
    next_prompt_index: int
    low_water_index: int
    closed_prompts: tuple[int, ...]
    op_id: int
    dataset_fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint; `committed_at` is Unix time."""

    id: CheckpointId
    objects: tuple[StoredObject, ...]
    cursor: Cursor
    committed_at: float


def make_id(run: str, attempt: int, step: int, request_id: str) -> CheckpointId:
    """The id that this request gets every time; raises `ValueError` for a run name or number that has none."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"run {run[:80]!r}: want 1-100 of A-Z a-z 0-9 _ . -, not starting with . or -")
    if not 0 <= attempt <= MAX_ATTEMPT or not 0 <= step <= MAX_STEP:
        raise ValueError(f"attempt {attempt} or step {step} is out of range")
    return CheckpointId(run, attempt, step, xxhash.xxh3_64_hexdigest(request_id.encode()))


def check_run(run: str) -> str:
    """Returns `run`, or raises `ValueError`."""
    return make_id(run, 0, 0, "").run


def parse_name(name: str) -> CheckpointId:
    """Reads "checkpoints/{run}/{id}"; raises `ValueError`."""
    parts = name.split("/")
    found = _ID.fullmatch(parts[2]) if len(parts) == 3 and parts[0] == "checkpoints" else None
    if not found:
        raise ValueError(f"name {name[:120]!r}: want checkpoints/{{run}}/{{id}}")
    return CheckpointId(check_run(parts[1]), int(found[1]), int(found[2]), found[3])


def check_objects(prefix: str, objects: tuple[StoredObject, ...]) -> None:
    """Raises `ValueError` unless the objects are distinct, below `prefix`, and have sizes and checksums."""
    if not objects:
        raise ValueError("objects: a checkpoint needs at least one")
    for item in objects:
        if not item.key.startswith(f"{prefix}/"):
            raise ValueError(f"objects: key {item.key[:120]!r} is not below {prefix}/")
        if not _CHECKSUM.fullmatch(item.checksum):
            raise ValueError(f"objects: checksum of {item.key[:120]} is not an xxh3_128 in lower-case hexadecimal")
        if item.size_bytes <= 0:
            raise ValueError(f"objects: {item.key[:120]} is empty")
    if len({item.key for item in objects}) != len(objects):
        raise ValueError("objects: two have the same key")


def check_cursor(cursor: Cursor) -> None:
    """Raises `ValueError` for a cursor that no loop can be at."""
    numbers = {key: value for key, value in asdict(cursor).items() if isinstance(value, int)}
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"cursor.{name}: {value} is negative")
    if cursor.low_water_index > cursor.next_prompt_index:
        raise ValueError("cursor.low_water_index: above next_prompt_index")
    closed = cursor.closed_prompts
    if len(set(closed)) != len(closed) or not all(
        cursor.low_water_index <= i < cursor.next_prompt_index for i in closed
    ):
        raise ValueError("cursor.closed_prompts: not distinct indices in [low_water_index, next_prompt_index)")


def encode(body: dict[str, Any]) -> bytes:
    """A record of ours: canonical JSON with its own checksum, so that a torn or edited one is noticed."""
    text = json.dumps({"format": _FORMAT, **body}, sort_keys=True, separators=(",", ":"))
    return json.dumps({"body": text, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}).encode()


def decode(data: bytes) -> dict[str, Any]:
    """The inverse of `encode`; raises `DamagedRecord`."""
    try:
        outer = json.loads(data)
        if xxhash.xxh3_128_hexdigest(outer["body"].encode()) != outer["xxh3_128"]:
            raise DamagedRecord("checksum differs")
        body = json.loads(outer["body"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedRecord(str(error) or "unreadable") from error
    if body.get("format") != _FORMAT:
        raise DamagedRecord(f"format {body.get('format')!r}; this version reads {_FORMAT}")
    return body


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    return encode(asdict(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of `encode_manifest`; raises `DamagedRecord`."""
    body = decode(data)
    try:
        cursor = body["cursor"]
        return Manifest(
            id=CheckpointId(**body["id"]),
            objects=tuple(StoredObject(**item) for item in body["objects"]),
            cursor=Cursor(**{**cursor, "closed_prompts": tuple(cursor["closed_prompts"])}),
            committed_at=body["committed_at"],
        )
    except (TypeError, KeyError) as error:
        raise DamagedRecord(f"not a manifest: {error}") from error
