"""Settings of the checkpoint service, and the store that they name."""

from pathlib import Path

from pydantic import Field

from reflux_checkpoint.manifest import ROOT
from reflux_checkpoint.retention import RetentionPolicy
from reflux_checkpoint.sweeper import SweepPolicy
from reflux_kit.errors import StartupError
from reflux_kit.settings import ServiceSettings, prefix
from reflux_storage.errors import StorageError
from reflux_storage.promises import check_conditional_writes
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options


class CheckpointSettings(ServiceSettings):
    """Environment names start with REFLUX_CHECKPOINT_."""

    model_config = prefix("checkpoint")

    listen: str = "127.0.0.1:7006"

    keep_last: int = Field(default=3, ge=1)
    """Newest intact checkpoints of a run that are kept."""

    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none."""

    lease_seconds: float = Field(default=3600.0, gt=0)
    """An uncommitted checkpoint without any write for this long is removed."""

    sweep_seconds: float = Field(default=60.0, gt=0)
    """Pause between two sweeps (garbage, retention, one read-back per run)."""

    scrub_every_seconds: float = Field(default=86400.0, ge=0)
    """Committed checkpoints are read back when their last read-back is older; 0 never."""

    store_threads: int = Field(default=16, ge=2)
    """Store calls at once."""

    store_timeout_seconds: float = Field(default=10.0, gt=0)
    """Longest silence of an S3 server; a call is tried twice."""

    def store_url(self) -> str:
        """Address of the object store; a folder below the state folder unless one is set."""
        if self.object_store:
            return self.object_store
        if not self.state_dir:
            raise StartupError("no object store: set REFLUX_OBJECT_STORE (file:///folder or s3://bucket/prefix)")
        return (Path(self.state_dir).absolute() / "objects").as_uri()

    def usable_store(self) -> ObjectStore:
        """Opens the store and tries what commits rest on; raises `StartupError` when it is away or not fit."""
        endpoint = self.s3_endpoint or None
        silence = self.store_timeout_seconds
        bounds = S3Options(
            endpoint=endpoint, attempts=2, connect_timeout_seconds=min(2.0, silence), read_timeout_seconds=silence
        )
        try:
            store = open_store(self.store_url(), bounds)
            store.check()
            check_conditional_writes(store, f"{ROOT}/probe")
        except (ValueError, StorageError) as error:
            raise StartupError(f"the object store cannot be used: {error}") from None
        return store

    def sweep_policy(self) -> SweepPolicy:
        """When to let go and when to look again."""
        return SweepPolicy(
            lease_seconds=self.lease_seconds,
            scrub_every_seconds=self.scrub_every_seconds,
            retention=RetentionPolicy(keep_last=self.keep_last, keep_every_steps=self.keep_every_steps),
        )
