"""Start-up probe and path tests: what works here, how fast it is, what is chosen and why."""
