"""Grants as placement groups of a Ray cluster."""
