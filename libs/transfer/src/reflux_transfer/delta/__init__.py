"""Deltas: bf16 weights sent as their difference to a version that the receiver holds already."""
