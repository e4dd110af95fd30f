"""Topology-aware gang scheduler and the agent that runs its roles."""
