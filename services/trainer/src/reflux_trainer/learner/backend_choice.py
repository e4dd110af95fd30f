"""Who computes, by the process's settings."""

import os
import signal

from reflux_trainer.learner.backends import Backend, OneRank
from reflux_trainer.learner.ranks.setup import RankSetup
from reflux_trainer.learner.settings import LearnerSettings


def chosen_backend(settings: LearnerSettings, lost: list[str]) -> Backend:
    """This process alone, or ranks; one that is lost is noted in `lost` and ends the process."""
    if settings.ranks == 1:
        return OneRank()
    from reflux_trainer.learner.ranks.backend import ManyRanks  # imports torch's compiler: seconds

    def ends(reason: str) -> None:
        lost.append(reason)
        os.kill(os.getpid(), signal.SIGTERM)

    setup = RankSetup(settings.ranks, settings.broker_address, settings, settings.rank_timeout_seconds)
    return ManyRanks(setup, ends)
