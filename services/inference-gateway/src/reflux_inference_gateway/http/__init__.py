"""The OpenAI door of the gateway."""
