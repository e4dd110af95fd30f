"""The run file: what to train, typed, checked and documented. Imports neither services nor torch."""
