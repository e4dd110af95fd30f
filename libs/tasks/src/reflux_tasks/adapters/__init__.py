"""Environments of other libraries as tasks, unchanged."""
