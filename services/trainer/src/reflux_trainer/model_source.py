"""How to make a run's model from nothing, or from one of its checkpoints."""

from dataclasses import dataclass

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.trainer.v1 import learner_service_pb2 as pb

ADAPTER = "run"
"""Name of a run's LoRA adapter."""


@dataclass(frozen=True)
class ModelSource:
    """How to make the model from nothing."""

    model_id: str
    folder: str
    seed: int
    transport: str
    weight_dtype: str = "float32"
    weight_delta: bool = False
    compute_dtype: str = "float32"
    gradient_checkpointing: bool = False
    deterministic: bool = False
    lora_rank: int = 0
    """Above 0: the run trains an adapter of this rank, and the model stays as it is."""
    lora_targets: frozenset[str] = frozenset()
    factors: bool = False
    """The adapter is published by itself, for engines that serve several; else the model with it added in."""

    @property
    def adapter(self) -> str:
        """Name of what is trained beside the model; empty when it is the model."""
        return ADAPTER if self.lora_rank else ""

    def creation(self) -> pb.CreateModelRequest:
        """The request for the model of the folder."""
        return pb.CreateModelRequest(
            model_id=self.model_id,
            path=self.folder,
            seed=self.seed,
            transport=self.transport,
            weight_dtype=self.weight_dtype,
            weight_delta=self.weight_delta,
            compute_dtype=self.compute_dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            deterministic=self.deterministic,
        )

    def adapter_creation(self) -> pb.CreateAdapterRequest:
        """The request for a fresh adapter."""
        return pb.CreateAdapterRequest(
            model_id=self.model_id,
            adapter=self.adapter,
            rank=self.lora_rank,
            train_attention="attention" in self.lora_targets,
            train_mlp="mlp" in self.lora_targets,
            train_unembed="unembed" in self.lora_targets,
            seed=self.seed,
        )

    def loading(self, checkpoint: checkpoint_pb2.Checkpoint) -> pb.LoadStateRequest:
        """The request for the model of a checkpoint."""
        return pb.LoadStateRequest(
            model_id=self.model_id,
            path=self.folder,
            store_url=checkpoint.store_url,
            objects=checkpoint.objects,
            transport=self.transport,
            seed=self.seed,
            weight_dtype=self.weight_dtype,
            weight_delta=self.weight_delta,
            compute_dtype=self.compute_dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            deterministic=self.deterministic,
        )
