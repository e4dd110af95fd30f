"""Stateful sessions: one child each that keeps its names and files over several calls."""
