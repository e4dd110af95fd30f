"""Stands in for SGLang's CUDA kernels, which have no CPU build: imports succeed, every call raises.

It must have no submodule `scalar_type`: SGLang then takes its own. Written for SGLang 0.5.23; to be removed when SGLang
starts on CPU without the package.
"""

import sys
import types
from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"
_SUBMODULES = (
    *("allreduce", "attention", "elementwise", "flash_attn", "flash_mla", "gemm", "grammar", "kvcacheio", "mamba"),
    *("memory", "moe", "quantization", "sampling", "sparse_flash_attn", "spatial", "speculative", "testing", "top_k"),
    "utils",
)


def _missing(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} does not exist on CPU")

    call.__name__ = name
    return call


class _Submodule(types.ModuleType):
    """Any name in it is a function that raises."""

    __path__: list[str] = []  # noqa: RUF012 - the import system wants a list

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return _missing(name)


for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = _Submodule(f"{__name__}.{_name}")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    return _missing(name)
