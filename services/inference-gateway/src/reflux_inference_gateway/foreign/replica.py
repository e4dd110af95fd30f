"""What the adapter reads from the model folder, and what it says to the gateway about its engine."""

import json
from pathlib import Path

from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.engine.replica import replica_name
from reflux_inference_gateway.foreign.follower import Follower
from reflux_inference_gateway.foreign.settings import AdapterSettings
from reflux_kit.errors import StartupError
from reflux_model.config import config_from_hf
from reflux_model.creation import CONFIG_FILE
from reflux_model.errors import UnsupportedModelError
from reflux_model.shapes import parameter_shapes
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.layout import Layout
from reflux_weightplan.spec import SpecLayout


def engine_layout(model: Path, dtype: str) -> SpecLayout:
    """The learner's tensors in the learner's order, whole. Raises `StartupError` naming the file."""
    path = model / CONFIG_FILE
    try:
        shapes = parameter_shapes(config_from_hf(json.loads(path.read_text())))
    except (OSError, UnsupportedModelError, ValueError) as error:
        raise StartupError(f"REFLUX_ENGINE_ADAPTER_MODEL: {path}: {error}") from None
    return single_rank(Layout.from_shapes({name: (shape, dtype) for name, shape in shapes.items()}))


class Description:
    """The replica's entry at the gateway: requests go straight to the engine's own HTTP door, never through here."""

    def __init__(self, settings: AdapterSettings, model_id: str, follower: Follower) -> None:
        self._follower = follower
        self._fixed = ReplicaMessage(
            name=replica_name(settings.run or settings.engine, settings.rank),
            model_id=model_id,
            http_url=settings.engine_url.rstrip("/"),
            role=ReplicaMessage.ROLE_BOTH,
            capacity=settings.capacity,
            node=settings.node,
            run=settings.run,
            engine=settings.engine.partition("-")[0],  # of SGLang by either way
        )

    @property
    def name(self) -> str:
        """Resource name of this process's replica."""
        return self._fixed.name

    def __call__(self) -> ReplicaMessage:
        """The replica at this moment."""
        message = ReplicaMessage()
        message.CopyFrom(self._fixed)
        message.version, message.epoch = self._follower.version, self._follower.epoch
        return message
