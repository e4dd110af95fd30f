"""Runs of reinforcement learning: their loop, rollout workers and the learner."""
