"""Shapes of model families from their Hugging Face configurations, and how engines lay them over ranks."""
