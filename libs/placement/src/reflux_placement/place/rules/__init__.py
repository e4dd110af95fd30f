"""Placement rules of other schedulers, written from their published descriptions: rivals in the simulation."""
