"""The second version of the interface, as far as it is imported."""

from .. import InterpolationMode  # noqa: F401, TID252 - the name must be torchvision
from .. import functional as functional  # noqa: TID252


def __getattr__(name: str) -> type:
    from .. import __getattr__ as missing  # noqa: TID252

    return missing(name)
