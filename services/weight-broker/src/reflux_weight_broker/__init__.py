"""The weight broker: who serves which version, and how the next one gets there."""
