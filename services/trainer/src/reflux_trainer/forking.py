"""What a fork starts from, and what it may change."""

from collections.abc import Mapping
from typing import Any

import grpc

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux_kit.errors import InvalidRequest, NotFound, Unavailable
from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal
from reflux_runs.load import changed
from reflux_trainer.peers import Peers

FIXED = ("seed", "task", "model", "warmup")
"""Sections that belong to the data and the weights of a checkpoint: whoever goes on from one keeps them."""
_SECONDS = 30.0


async def find_origin(peers: Peers, run: str, name: str) -> checkpoint_pb2.Checkpoint:
    """The checkpoint `name` of a run, "" for its newest intact one. Raises NotFound, InvalidRequest or Unavailable."""
    if name and not name.startswith(f"checkpoints/{run}/"):
        text = f"{name[:80]!r} is no checkpoint of {run}; `reflux checkpoints` lists them"
        raise InvalidRequest(text, field="checkpoint")
    stub = peers.checkpoint
    try:
        if name:
            return (await stub.GetCheckpoint(pb.GetCheckpointRequest(name=name), timeout=_SECONDS)).checkpoint
        newest = pb.GetLatestCheckpointRequest(run=run)
        return (await stub.GetLatestCheckpoint(newest, timeout=_SECONDS)).checkpoint
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise Unavailable(f"the checkpoint service answered {error.code().name}: {error.details()}") from None
        raise NotFound(f"run {run!r} has no checkpoint {name}; `reflux checkpoints` lists them") from None


def forked_config(
    source: RunConfig, changes: Mapping[str, Any], run: str, origin: checkpoint_pb2.Checkpoint
) -> RunConfig:
    """The configuration of a fork of `run` at `origin`. Raises InvalidRequest or ConfigError."""
    config = changed(source, changes)
    fixed = [name for name in FIXED if getattr(source, name) != getattr(config, name)]
    if fixed:
        raise InvalidRequest(f"a fork keeps {', '.join(fixed)}: start a new run instead", field=fixed[0])
    if config.rl.steps <= origin.cursor.step:
        reason = f"counts from the beginning of {run}, and {origin.name} is at step {origin.cursor.step}"
        raise ConfigError((Refusal("rl.steps", config.rl.steps, reason, str(origin.cursor.step + source.rl.steps)),))
    return config
