"""Owns what a grant asks of Kueue: the annotations that make its accounting agree with a placement made already.

Pods are pinned to exact nodes anyway; the annotations let Kueue's topology-aware admission count the right domains. A
group without any topology request stays gated for ever in a topology-aware queue (marin#7217), so one is always made.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from reflux_scheduler.backends.kubernetes.names import HOSTNAME

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_PREFIX = "kueue.x-k8s.io/podset-"


def topology_annotations(levels: Sequence[str], labels_of_nodes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Annotations for the pod template of a group of pods, one per node.

    The tightest level that holds all nodes is required. Where the next tighter levels cut the group into pieces, the
    greatest common divisor of the pieces is the slice size of the tightest of them that allows slices of two or more.

    Args:
        levels: node label keys of Kueue's Topology, outermost first; empty asks for no topology.
        labels_of_nodes: labels of the group's nodes.
    """
    if not levels:
        return {}
    paths = [tuple(labels.get(key, "") for key in levels) for labels in labels_of_nodes]
    shared = max((depth for depth in range(len(levels) + 1) if len({path[:depth] for path in paths}) == 1), default=0)
    while shared and not paths[0][shared - 1]:
        shared -= 1
    annotations = (
        {f"{_PREFIX}required-topology": levels[shared - 1]} if shared else {f"{_PREFIX}unconstrained-topology": "true"}
    )
    for depth in range(len(levels), shared, -1):
        pieces = Counter(path[:depth] for path in paths)
        size = math.gcd(*pieces.values())
        if size > 1 and levels[depth - 1] != HOSTNAME and all(path[depth - 1] for path in paths):
            # Kueue takes slices without a required level, but never two whole-set requests at once.
            annotations |= {
                f"{_PREFIX}slice-required-topology": levels[depth - 1],
                f"{_PREFIX}slice-size": str(size),
            }
            break
    return annotations
