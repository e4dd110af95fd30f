"""The whole conformance suite on backend `kubernetes`."""

import pytest
from conformance import *  # noqa: F403
from kube_conformance import world, zygote

__all__ = ["world", "zygote"]
pytestmark = pytest.mark.slow
