"""Who goes first: priority, quotas, fair share, backfill, preemption, elasticity, spares, defragmentation."""
