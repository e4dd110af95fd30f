"""Where a gang goes: feasibility with reasons, domain choice, segments, cost, rank order."""
