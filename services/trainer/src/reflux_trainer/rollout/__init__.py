"""Rollout workers: claim a prompt, generate, have it graded, emit the group. They hold no state of their own."""
