"""Type of the Redis client in annotations."""

from typing import Any, TypeAlias

RedisClient: TypeAlias = Any
"""redis-py types each answer for text and bytes at once; everything here reads bytes, which those types cannot say."""
