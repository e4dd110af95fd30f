"""The families of crystals and reactions only, so that a test need not warm up the others."""

from reflux_sandbox.isolation.graders import LoadedVerifiers

__all__ = ["LoadedVerifiers", "family_names"]


def family_names() -> list[str]:
    """Names of the tasks that use chemistry."""
    return ["crystal-structure", "synthesis-planning"]
