"""Calls to gateway and sandbox that ride out their restarts; the trainer's evaluation and the workers share them."""
