"""Any name is a function that raises."""

from collections.abc import Callable
from typing import NoReturn

from . import InterpolationMode  # noqa: F401 - the name must be torchvision


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"torchvision is a stand-in here: no {name}")

    return call
