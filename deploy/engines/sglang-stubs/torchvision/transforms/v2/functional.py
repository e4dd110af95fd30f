"""The second version of the interface: the same stand-ins."""

from ..functional import __getattr__  # noqa: F401, TID252 - the name must be torchvision
