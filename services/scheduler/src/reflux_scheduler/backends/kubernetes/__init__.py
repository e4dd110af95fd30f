"""Backend `kubernetes`: grants are JobSets (or LeaderWorkerSets) of agents, pinned to exactly the grant's nodes."""
