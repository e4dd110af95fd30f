"""Routing policies by name; a policy is pure and sees candidates only."""

from typing import Literal

from reflux_inference_gateway.routing.base import RoutingPolicy
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.routing.round_robin import RoundRobin

PolicyName = Literal["least_loaded", "round_robin"]
POLICIES: dict[PolicyName, type[RoutingPolicy]] = {"least_loaded": LeastLoaded, "round_robin": RoundRobin}
