"""Names that are imported; any use raises."""

import enum
from typing import NoReturn


class ImageReadMode(enum.Enum):
    """Modes of torchvision."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def decode_image(*_args: object, **_kwargs: object) -> NoReturn:
    """Raises."""
    raise RuntimeError("torchvision is a stand-in here: no images")


decode_jpeg = decode_image
