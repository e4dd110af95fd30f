"""Choices that settings and the engine share; free of torch."""

from typing import Literal

KvPolicy = Literal["refresh", "keep"]
"""What happens to the keys and values of running sequences when weights are swapped."""

RoleName = Literal["prefill", "decode", "both"]
