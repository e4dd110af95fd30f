"""Synthesis planning: from a target oxide to precursors, amounts, gases and a temperature."""
