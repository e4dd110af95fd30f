"""What the two modes of a replica with arenas have in common."""

import asyncio

from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Receiver
from reflux_transfer.handles import ANYWHERE, Scope


class ArenaReceiver(Receiver):
    """Pulls into arenas that others may read; owns the puller."""

    def __init__(
        self, arenas: ReplicaArenas, *, rank: int = 0, scope: Scope = ANYWHERE, puller: Puller | None = None
    ) -> None:
        """Handles of the arenas lie in `scope`. So do those that are read, unless a `puller` says otherwise."""
        self.arenas: ReplicaArenas = arenas
        self._rank, self._scope = rank, scope
        self._puller = Puller(scope) if puller is None else puller

    async def close(self) -> None:
        await asyncio.to_thread(self._puller.close)
