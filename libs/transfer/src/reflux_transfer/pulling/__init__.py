"""Pulling: following an arena while it is filled, every piece verified before it counts."""
