"""Discrete events over the production policy."""
