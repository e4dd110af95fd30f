"""Tasks that reflux trains on: each owns its problems, its words and its verifiers."""
