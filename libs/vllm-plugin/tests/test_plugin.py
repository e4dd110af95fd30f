"""The plug-in without vLLM: stand-ins for the four names that it takes from it, real transfers underneath."""

import importlib
import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
import torch

import reflux_vllm_plugin
from reflux_transfer import fingerprint
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Offer, Route, SourceRegion
from reflux_transfer.layout import Layout
from reflux_transfer.offers import offer_to_json
from reflux_vllm_plugin.pulling import Puller
from reflux_vllm_plugin.worker import RefluxWorker
from reflux_weightplan.wire import canonical

LAYOUT = Layout.from_shapes({"a.weight": ([4, 6], "bfloat16"), "b.weight": ([6], "float32")})
SPEC = single_rank(LAYOUT)
TEXT = canonical(SPEC).decode()
HANG_GUARD_SECONDS = 30.0


class Owner:
    """Offers random weights from memory of this process."""

    def __init__(self) -> None:
        self.backend = ShmBackend()
        self.arenas = PublisherArenas(self.backend, LAYOUT)

    def offer(self, epoch: int, *, flip: bool = False) -> tuple[str, dict[str, bytes]]:
        rng = np.random.default_rng(epoch)
        tensors = {"a.weight": rng.integers(0, 99, (4, 6), np.uint16), "b.weight": rng.standard_normal(6, np.float32)}
        staging = self.arenas.begin(0.0)
        staging.write(tensors)
        if flip:
            self.arenas.view(staging.generation)[3] ^= 1
        region, end = SourceRegion(0, staging.offer(), "shm", staging.generation), time.monotonic() + 60
        offer = Offer(epoch, epoch, "full", (region,), Route(SPEC, SPEC, 0), end, 60.0)
        return offer_to_json(offer), {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.backend.close()


@pytest.fixture
def puller() -> Iterator[Puller]:
    puller = Puller(SPEC)
    yield puller
    puller.close()


def settled(puller: Puller) -> dict[str, Any]:
    assert puller._thread
    puller._thread.join(HANG_GUARD_SECONDS)
    return puller.status()


def test_an_offer_is_pulled_beside_the_worker_and_says_what_it_took(owner, puller) -> None:
    offer, tensors = owner.offer(3)
    puller.start(offer)
    status = settled(puller)
    assert (status["state"], status["epoch"]) == ("ready", 3)
    assert json.loads(json.dumps(status)) == status
    view = puller.taken(3)
    assert status["fingerprint"] == f"{fingerprint.of(view, LAYOUT):016x}"
    assert bytes(view[: LAYOUT.slots[0].nbytes]) == tensors["a.weight"]
    with pytest.raises(RuntimeError, match="epoch 4 was not pulled"):
        puller.taken(4)


def test_a_pull_that_fails_says_why_and_the_next_one_works(owner, puller) -> None:
    puller.start(owner.offer(1, flip=True)[0])
    status = settled(puller)
    assert status["state"] == "failed"
    assert status["error"].startswith("ChecksumMismatch: ")
    assert "a.weight" in status["error"]
    with pytest.raises(RuntimeError):
        puller.taken(1)
    puller.start(owner.offer(2)[0])
    assert settled(puller)["state"] == "ready"


def test_a_new_offer_waits_until_the_old_pull_has_let_go_of_the_buffer(owner, puller, monkeypatch) -> None:
    entered, order = threading.Event(), []

    def slow(offer: Offer, cancelled: Any) -> Any:
        order.append(f"begin {offer.epoch}")
        entered.set()
        while offer.epoch == 1 and not cancelled():
            pass
        order.append(f"end {offer.epoch}")
        return real(offer, cancelled)

    real = puller.intake.pull
    monkeypatch.setattr(puller.intake, "pull", slow)
    puller.start(owner.offer(1)[0])
    assert entered.wait(HANG_GUARD_SECONDS)
    assert puller.status()["state"] == "pulling"
    puller.start(owner.offer(2)[0])
    assert settled(puller)["epoch"] == 2
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]


class Factory:
    """vLLM's registry."""

    names: dict[str, tuple[str, str]]

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls.names:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls.names[name] = module, class_name


@pytest.fixture
def vllm(monkeypatch) -> list[str]:
    """Stand-ins for the modules of vLLM; returns the calls to its layer-wise reload."""

    class Base:
        def __init__(self, model: Any) -> None:
            self.model, self.model_config = model, "config"

        def __class_getitem__(cls, _item: Any) -> type:
            return cls

        def parse_update_info(self, fields: dict[str, Any]) -> Any:
            return self.update_info_cls(**fields)  # pyright: ignore[reportAttributeAccessIssue]

    calls: list[str] = []
    base = {"WeightTransferEngine": Base, "WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    reload = {
        "initialize_layerwise_reload": lambda _model: calls.append("begin"),
        "finalize_layerwise_reload": lambda _model, _config: calls.append("finish"),
    }
    Factory.names = {}
    modules = {
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor.model_loader.reload": reload,
    }
    for name, content in modules.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        for key, value in content.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    monkeypatch.delitem(sys.modules, "reflux_vllm_plugin.engine", raising=False)
    return calls


class Model:
    """Keeps what it is given; fails at a tensor when it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.fails_at = fails_at

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.fails_at:
                raise KeyError(name)
            self.loaded[name] = tensor.clone()


def new_engine(model: Model) -> Any:
    return importlib.import_module("reflux_vllm_plugin.engine").RefluxWeightEngine(model)


def test_a_worker_pulls_loads_and_holds_the_published_bytes(vllm, owner) -> None:
    model = Model()
    engine = new_engine(model)
    worker = RefluxWorker()
    worker.weight_transfer_engine = engine
    engine.init_transfer_engine(engine.init_info_cls(layout=TEXT))
    offer, tensors = owner.offer(5)
    assert worker.reflux_prepare(offer)["epoch"] == 5
    settled(engine.puller)
    assert worker.reflux_status()["state"] == "ready"
    engine.start_weight_update()
    engine.update_weights({"epoch": 5})
    engine.finish_weight_update()
    assert vllm == ["begin", "finish"]
    assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in model.loaded.items()} == tensors
    assert (model.loaded["a.weight"].dtype, model.loaded["a.weight"].shape) == (torch.bfloat16, (4, 6))
    assert worker.reflux_cancel() == {"state": "idle", "epoch": 0}
    engine.shutdown()


def test_a_load_that_fails_leaves_nothing_behind_for_the_next(vllm, owner) -> None:
    engine = new_engine(Model(fails_at="b.weight"))
    engine.init_transfer_engine(engine.init_info_cls(layout=TEXT))
    engine.prepare(owner.offer(5)[0])
    settled(engine.puller)
    engine.start_weight_update()
    with pytest.raises(KeyError):
        engine.update_weights({"epoch": 5})
    assert vllm == ["begin", "finish"], "half of a load stays in vLLM's buffers"
    engine.shutdown()


def test_nothing_works_before_the_layout_is_known(vllm) -> None:
    engine = new_engine(Model())
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        engine.status()


def test_registering_twice_is_registering_once(vllm) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="reflux")
    register = found.load()
    register()
    register()
    assert Factory.names == {reflux_vllm_plugin.BACKEND: ("reflux_vllm_plugin.engine", "RefluxWeightEngine")}


def test_the_workers_side_needs_neither_grpc_nor_protos_nor_our_kit() -> None:
    banned = "grpc", "google", "reflux", "reflux_kit", "torch", "vllm"
    code = f"import sys\nsys.modules.update(dict.fromkeys({banned!r}))\nimport reflux_vllm_plugin.pulling"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_GUARD_SECONDS)
