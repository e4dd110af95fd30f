"""Algorithms as pure numpy functions: advantages, corrections, aggregation."""
