"""Bytes from another process's memory: register, describe, read one-sided, verify."""
