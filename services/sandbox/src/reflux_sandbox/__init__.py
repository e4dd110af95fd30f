"""Durable verification jobs and untrusted code, in children that cannot reach anything."""
