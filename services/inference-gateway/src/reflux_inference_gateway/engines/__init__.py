"""How the gateway talks to replicas, one file per kind of engine."""
