"""Routing policies by name; a policy is pure and sees candidates only."""

from typing import Literal

from reflux_inference_gateway.routing.base import RoutingPolicy
from reflux_inference_gateway.routing.group_spread import GroupSpread
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.routing.power_of_two import PowerOfTwo
from reflux_inference_gateway.routing.prefix import Prefix
from reflux_inference_gateway.routing.round_robin import RoundRobin
from reflux_inference_gateway.routing.session import Session

PolicyName = Literal["group_spread", "least_loaded", "power_of_two", "prefix", "round_robin", "session"]
POLICIES: dict[PolicyName, type[RoutingPolicy]] = {
    "group_spread": GroupSpread,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix": Prefix,
    "round_robin": RoundRobin,
    "session": Session,
}
