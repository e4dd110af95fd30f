"""The process that talks to Ray; the only part of the scheduler that imports it."""
