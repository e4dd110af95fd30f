"""Names that are imported; any use raises."""

import enum
from typing import NoReturn


class InterpolationMode(enum.Enum):
    """Modes of torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    def init(self: object, *_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(f"torchvision is a stand-in here: no {name}")

    return type(name, (), {"__init__": init})


from . import functional  # noqa: E402, F401 - needs InterpolationMode
