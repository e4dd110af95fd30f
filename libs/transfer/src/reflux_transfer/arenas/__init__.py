"""Arenas: memory of a publisher or a replica that others may read, each with a header that says what it holds."""
