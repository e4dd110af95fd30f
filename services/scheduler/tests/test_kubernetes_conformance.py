"""The conformance suite on backend `kubernetes`: a start, an adoption and a replacement; `make soak` runs all of it."""

from conformance import (
    test_a_gang_runs_as_one_with_its_environment_and_a_cancel_leaves_nothing,
    test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on,
    test_a_restarted_scheduler_adopts_what_runs_and_can_still_stop_it,
)
from kube_conformance import world, zygote

__all__ = [
    "test_a_gang_runs_as_one_with_its_environment_and_a_cancel_leaves_nothing",
    "test_a_lost_node_is_replaced_by_the_spare_of_its_rack_and_the_others_run_on",
    "test_a_restarted_scheduler_adopts_what_runs_and_can_still_stop_it",
    "world",
    "zygote",
]
