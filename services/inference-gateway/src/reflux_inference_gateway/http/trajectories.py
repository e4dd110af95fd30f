"""The weight version at which each trajectory began. Pure."""

from collections import OrderedDict

MAX_TRAJECTORIES = 65_536


class Trajectories:
    """Remembers the version of each trajectory's first request; above the limit the longest unused one goes."""

    def __init__(self, max_trajectories: int = MAX_TRAJECTORIES) -> None:
        self._versions: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._max = max_trajectories

    def started(self, model: str, session: str, version: int) -> int:
        """The version at the trajectory's start, which is `version` if this is its first request."""
        key = (model, session)
        first = self._versions.setdefault(key, version)
        self._versions.move_to_end(key)
        if len(self._versions) > self._max:
            self._versions.popitem(last=False)
        return first
