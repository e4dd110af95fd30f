"""Catalog and commit protocol of checkpoints; tensor bytes never pass through it."""
