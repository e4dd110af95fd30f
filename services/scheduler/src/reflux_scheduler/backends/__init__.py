"""Mechanisms that start and stop the members of a placed job."""
