"""What a rank can be told to do with its part of the model, in its torch thread; rank 0 does the same beside it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reflux_model.folder import load_config, load_folder
from reflux_model.shapes import parameter_shapes
from reflux_storage.stream import ObjectReceipt, TensorSource, write_tensors
from reflux_trainer.learner.casting import caster
from reflux_trainer.learner.figures import BatchSums
from reflux_trainer.learner.folders import Source
from reflux_trainer.learner.ops import GroupData, LossSpec, StepSpec
from reflux_trainer.learner.ranks.member import ShardMember
from reflux_trainer.learner.ranks.state import captured, read_member
from reflux_trainer.learner.state import StoreAddress
from reflux_transfer.arenas.staging import Staging


@contextmanager
def joined(rank: int, ranks: int, rendezvous: str, timeout_seconds: float) -> Iterator[DeviceMesh]:
    """Membership in the process group that meets at the file `rendezvous`; gloo, as the model lies on the host."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


class ShardWorks:
    """Owns the rank's part of at most one model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._member: ShardMember | None = None
        self.copies: list[TensorSource] = []
        """What `capture` copied."""
        self.staging: Staging | None = None
        """The arena that `write` fills, claimed by the rank's publisher."""

    @property
    def member(self) -> ShardMember:
        """The part of the model that is loaded."""
        assert self._member is not None, "rank 0 creates a model first"
        return self._member

    def create(self, source: Source) -> None:
        """Loads a folder and keeps this rank's slices."""
        config, params = load_folder(source.folder)
        self._member = ShardMember(config, params, source.numerics, self.mesh)

    def restore(self, source: Source, address: StoreAddress, key: str) -> None:
        """Loads the rank's part of a stored state; `key` is that of rank 0's object."""
        config = load_config(source.folder)
        blank = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
        member = ShardMember(config, blank, source.numerics, self.mesh)
        read_member(address, key, member)
        self._member = member

    def forward_backward(self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int) -> BatchSums:
        """See `ShardMember`."""
        return self.member.forward_backward(groups, loss, micro_batch)

    def rescored(self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int, reference: bool) -> BatchSums:
        """See `ShardMember`."""
        return self.member.rescored(groups, loss, micro_batch, reference)

    def optim_step(self, step: StepSpec) -> tuple[float, bool]:
        """See `ShardMember`."""
        return self.member.optim_step(step)

    def capture(self) -> None:
        """Copies the state, to be written while training goes on."""
        self.copies = captured(self.member)

    def write_state(self, address: StoreAddress, key: str) -> ObjectReceipt:
        """Streams what `capture` copied; in any thread."""
        return write_tensors(address.open(), key, self.copies)

    def write(self, dtype: torch.dtype) -> int:
        """Copies the rank's weights into the claimed arena; their fingerprint."""
        assert self.staging is not None, "the rank's publisher claims an arena first"
        return self.staging.write({name: tensor.detach() for name, tensor in self.member.shards.items()}, caster(dtype))
