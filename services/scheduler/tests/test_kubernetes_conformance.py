"""The conformance suite on backend `kubernetes`: the life of a gang and a replacement; `make soak` runs all of it."""

from conformance import (
    test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on,
    test_the_life_of_a_gang,
)
from kube_conformance import world, zygote

__all__ = [
    "test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on",
    "test_the_life_of_a_gang",
    "world",
    "zygote",
]
