"""What /collective_rpc can call on each worker. For `--worker-extension-cls reflux_vllm_plugin.worker.RefluxWorker`."""

from typing import Any, Protocol


class _Pulls(Protocol):
    """The part of `RefluxWeightEngine` that is used here."""

    def prepare(self, offer: str) -> None: ...
    def cancel(self) -> None: ...
    def status(self) -> dict[str, Any]: ...


class RefluxWorker:
    """Mixed into vLLM's worker class. All methods return at once: they run between two steps of the model."""

    weight_transfer_engine: _Pulls

    def reflux_prepare(self, offer: str) -> dict[str, Any]:
        """Begins to pull an offer (`offers.offer_to_json`) in a thread; returns the status."""
        self.weight_transfer_engine.prepare(offer)
        return self.weight_transfer_engine.status()

    def reflux_status(self) -> dict[str, Any]:
        """How far the pull is."""
        return self.weight_transfer_engine.status()

    def reflux_cancel(self) -> dict[str, Any]:
        """Ends a pull; returns the status after it."""
        self.weight_transfer_engine.cancel()
        return self.weight_transfer_engine.status()
