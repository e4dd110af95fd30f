"""Where the stack is: from the environment, or from the record that a local stack writes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings

RECORD = "stack.json"
_ADDRESS_FIELDS = {
    "scheduler": "scheduler_address",
    "trainer": "trainer_address",
    "inference-gateway": "gateway_address",
    "weight-broker": "broker_address",
    "sandbox": "sandbox_address",
    "checkpoint": "checkpoint_address",
}


class ClientError(Exception):
    """Something that the person at the terminal can mend; printed as one line, exit status 2."""


@dataclass(frozen=True)
class StackRecord:
    """A running local stack."""

    pid: int
    state_dir: Path
    redis_url: str
    grpc: dict[str, str]
    http: dict[str, str]
    pids: dict[str, int]
    restarts: dict[str, int]


def state_dir() -> Path:
    """Folder of the local stack: REFLUX_STATE_DIR, or .reflux in the current folder."""
    return Path(os.environ.get("REFLUX_STATE_DIR") or ".reflux").resolve()


def read_record(folder: Path | None = None) -> StackRecord | None:
    """The local stack's record; None when no stack runs there."""
    folder = folder or state_dir()
    try:
        record = json.loads((folder / RECORD).read_text())
        os.kill(record["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise ClientError(f"the state folder {folder} cannot be used: {error.strerror}") from None
    return StackRecord(
        pid=record["pid"],
        state_dir=folder,
        redis_url=record["redis_url"],
        grpc=record["grpc"],
        http=record["http"],
        pids=record["pids"],
        restarts=record["restarts"],
    )


def settings() -> ServiceSettings:
    """Addresses and token to call with. Raises `ClientError` when neither environment nor record names a stack."""
    if "REFLUX_TRAINER_ADDRESS" in os.environ:
        return ServiceSettings()
    record = read_record()
    if record is None:
        raise ClientError(
            f"no stack runs in {state_dir()}: start one with `reflux up`, "
            "or name one with REFLUX_STATE_DIR (local) or REFLUX_TRAINER_ADDRESS"
        )
    found = {field: record.grpc[name] for name, field in _ADDRESS_FIELDS.items()}
    return ServiceSettings.model_validate(found | {"redis_url": record.redis_url, "state_dir": str(record.state_dir)})


def channel(service: str, max_message_mib: int = 4) -> grpc.aio.Channel:
    """A channel to one service, for example "trainer", for answers of up to `max_message_mib`."""
    found = settings()
    address = getattr(found, _ADDRESS_FIELDS[service])
    return open_channel(address, found, subject="cli", max_message_mib=max_message_mib)
