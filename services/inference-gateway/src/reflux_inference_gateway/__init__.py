"""The inference gateway: replicas, routing, fleet pause, and both front doors."""
