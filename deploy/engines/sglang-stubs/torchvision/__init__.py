"""Stands in for torchvision, which does not load beside the CPU build of torch: text models only import it."""

from . import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
