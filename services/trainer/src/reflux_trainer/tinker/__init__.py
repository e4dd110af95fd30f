"""The Tinker-compatible HTTP API: a thin user of the learner's primitives and of the inference gateway."""
