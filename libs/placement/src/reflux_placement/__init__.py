"""Placement and queue policy as pure functions."""
