"""Decides between two buffers of weights and one, by the memory that there is. Pure."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["swap", "in_place"]
WantedMode = Literal["auto", "swap", "in_place"]


class NotEnoughMemory(MemoryError):
    """Neither mode, or not the wanted one, fits; the text has the arithmetic."""


@dataclass(frozen=True)
class Budget:
    """Bytes: of one copy of the weights, of what a replica may use for weights and KV cache together, of the cache."""

    weights_bytes: int
    free_bytes: int
    kv_bytes: int = 0


@dataclass(frozen=True)
class ModeChoice:
    """`swap`: a shadow buffer, the pause is an exchange of pointers. `in_place`: one buffer, the pause is the pull."""

    mode: Mode
    sentence: str

    @property
    def buffers(self) -> Literal[1, 2]:
        """Buffers of `ReplicaArenas`."""
        return 2 if self.mode == "swap" else 1


def choose_mode(budget: Budget, wanted: WantedMode = "auto") -> ModeChoice:
    """`swap` where two copies and the cache fit, else `in_place`. Raises `NotEnoughMemory`."""
    mode: Mode = wanted if wanted != "auto" else "swap" if _needed(budget, "swap") <= budget.free_bytes else "in_place"
    sentence = _sentence(budget, mode)
    if wanted == "auto" and mode == "in_place":
        sentence = f"{_sentence(budget, 'swap')}; {sentence}"
    if _needed(budget, mode) > budget.free_bytes:
        raise NotEnoughMemory(sentence)
    return ModeChoice(mode, sentence)


def _needed(budget: Budget, mode: Mode) -> int:
    return budget.weights_bytes * (2 if mode == "swap" else 1) + budget.kv_bytes


def _sentence(budget: Budget, mode: Mode) -> str:
    needed = _needed(budget, mode)
    sign, end = ("<=", mode) if needed <= budget.free_bytes else (">", f"no {mode}")
    copies = 2 if mode == "swap" else 1
    return (
        f"{copies} x {_mb(budget.weights_bytes)} + KV {_mb(budget.kv_bytes)} = {_mb(needed)} {sign} "
        f"{_mb(budget.free_bytes)} free: {end}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
