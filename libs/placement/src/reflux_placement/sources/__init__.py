"""Topologies from files and from what clusters say of themselves."""
