"""Hands computed prompts from one engine to another: registered here, read there one-sided (`reflux_transfer`).

A region holds [generation, keys, values]; it is written once, before its ticket exists, and withdrawn when it is
released or its lease ends. Nobody's offer goes earlier for another one: what does not fit is refused. The ticket
travels through whoever pairs the two engines, as `kv_transfer_params` do in vLLM's NIXL protocol. What was read counts
only if the generation is the ticket's before and after the read and the checksum of the bytes is right; otherwise the
reader computes the prompt itself.
"""

import base64
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.types import ComputedPrompt
from reflux_model.cache import PrefixKV
from reflux_model.config import ModelConfig
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.wire import scope_of
from reflux_transfer.errors import TransferError
from reflux_transfer.handles import Scope
from reflux_transfer.probe.choice import Choice
from reflux_transfer.regions import LocalRegion
from reflux_transfer.registry import open_backend

_HEADER_BYTES = 64
_GENERATION = slice(0, 8)
_READ_SECONDS = 5.0


class HandoverFailed(Exception):
    """The prompt's keys and values could not be had; the text says why."""


class KvExchange:
    """Owns the prompts that this engine offers, at most `limit_bytes` of them, and the backends. Thread-safe."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        opened: Callable[[str], TransferBackend],
        own: str,
        scope: Scope,
        *,
        limit_bytes: int,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own` is the backend that offers; others are opened for tickets that name them."""
        self._config, self._dtype, self._scope, self._clock = config, dtype, scope, clock
        self._opened, self._own = opened, own
        self._backends: dict[str, TransferBackend] = {}
        self._limit_bytes, self._lease_seconds = limit_bytes, lease_seconds
        self._offers: dict[int, tuple[LocalRegion, float]] = {}
        self._lock = threading.Lock()

    def offer(self, prompt: Sequence[int], computed: ComputedPrompt) -> dict[str, Any]:
        """Registers a prompt; returns its ticket. Raises `TransferError`, or `MemoryError` at the bound."""
        payload = [_bytes(computed.kv.keys), _bytes(computed.kv.values)]
        length = _HEADER_BYTES + sum(map(len, payload))
        with self._lock:
            self._expire()
            if length > self._limit_bytes - self._held_bytes():
                raise MemoryError(f"{length} bytes beside {self._held_bytes()}; all offers have {self._limit_bytes}")
            backend = self._backend(self._own)
            region, generation = backend.allocate(length), secrets.randbits(63)
            self._offers[generation] = (region, self._clock() + self._lease_seconds)
            content = np.frombuffer(region.view, np.uint8)
            content[_HEADER_BYTES:] = np.concatenate(payload)
            content[_GENERATION] = np.frombuffer(generation.to_bytes(8, "little"), np.uint8)
            return {
                "backend": self._own,
                "handle": base64.b64encode(backend.describe(region, self._scope)).decode(),
                "generation": generation,
                "positions": int(computed.kv.lengths_B[0]),
                "epoch": computed.epoch,
                "prompt": _digest(prompt),
                "checksum": xxhash.xxh3_64_hexdigest(content[_HEADER_BYTES:].data),
            }

    def fetch(self, prompt: Sequence[int], ticket: dict[str, Any]) -> ComputedPrompt:
        """Reads the prompt that a ticket names. Raises `HandoverFailed`."""
        try:
            if ticket["prompt"] != _digest(prompt) or ticket["positions"] != len(prompt) - 1:
                raise HandoverFailed("the ticket is of another prompt")
            return ComputedPrompt(self._read(ticket, len(prompt) - 1), int(ticket["epoch"]))
        except (TransferError, MemoryError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise HandoverFailed(f"{type(error).__name__}: {error}") from error

    def release(self, generation: int) -> bool:
        """Takes an offer back; whoever reads it later is told so. False when there is none."""
        with self._lock:
            return self._withdraw(generation)

    def expire(self) -> int:
        """Takes back what is past its lease; returns how many."""
        with self._lock:
            return self._expire()

    @property
    def held_bytes(self) -> int:
        """Memory of all offers."""
        with self._lock:
            return self._held_bytes()

    def close(self) -> None:
        """Takes everything back."""
        with self._lock:
            for generation in tuple(self._offers):
                self._withdraw(generation)
            for backend in self._backends.values():
                backend.close()
            self._backends.clear()

    def _read(self, ticket: dict[str, Any], positions: int) -> PrefixKV:
        config = self._config
        shape = (config.num_layers, 1, config.num_kv_heads, positions, config.head_size)
        half = int(np.prod(shape)) * self._dtype.itemsize
        generation = int(ticket["generation"]).to_bytes(8, "little")
        with self._lock:
            backend = self._backend(str(ticket["backend"]))
        remote = backend.open(base64.b64decode(ticket["handle"]), self._scope)
        local = backend.allocate(_HEADER_BYTES + 2 * half)
        try:
            backend.read(remote, 0, local, 0, local.length, _READ_SECONDS)
            content = np.frombuffer(local.view, np.uint8).copy()
            backend.read(remote, 0, local, 0, _HEADER_BYTES, _READ_SECONDS)
            again = bytes(local.view[_GENERATION])
        finally:
            backend.release(remote)
            backend.unregister(local)
        if not content[_GENERATION].tobytes() == again == generation:
            raise HandoverFailed("the memory holds something else by now")
        if xxhash.xxh3_64_hexdigest(content[_HEADER_BYTES:].data) != ticket["checksum"]:
            raise HandoverFailed("the bytes that arrived are not those that were offered")
        keys, values = (
            torch.from_numpy(content[start : start + half]).view(self._dtype).view(shape)
            for start in (_HEADER_BYTES, _HEADER_BYTES + half)
        )
        return PrefixKV(keys, values, torch.tensor([positions]))

    def _held_bytes(self) -> int:
        return sum(region.length for region, _ in self._offers.values())

    def _expire(self) -> int:
        now = self._clock()
        ended = [generation for generation, (_, end) in self._offers.items() if end <= now]
        return sum(map(self._withdraw, ended))

    def _withdraw(self, generation: int) -> bool:
        region, _ = self._offers.pop(generation, (None, 0.0))
        if region is not None:
            with suppress(TransferError):
                self._backend(self._own).unregister(region)
        return region is not None

    def _backend(self, name: str) -> TransferBackend:
        if name not in self._backends:
            self._backends[name] = self._opened(name)
        return self._backends[name]


def new_exchange(
    settings: EngineSettings, config: ModelConfig, dtype: torch.dtype, model_id: str, choice: Choice | None
) -> KvExchange:
    """The exchange of one engine: offers by the transport of the settings, reads by that of the ticket."""
    chosen = choice.name if choice is not None else ""
    return KvExchange(
        config,
        dtype,
        lambda name: open_backend(name, settings.transfer),
        (chosen or "shm") if settings.transport == "auto" else settings.transport,
        scope_of(model_id, settings.stack_secret),
        limit_bytes=settings.handover_bytes,
        lease_seconds=settings.handover_seconds,
    )


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _digest(prompt: Sequence[int]) -> str:
    return xxhash.xxh3_128_hexdigest(np.asarray(prompt, np.int64).data)
