"""Engines that are not ours as replicas: an adapter process beside each brings it the broker's weights."""
