"""Which arrived groups make the next batch under a bound on lag: one module per policy."""
