"""The fidelity ladder: a group is released on a cheap rung; full grades come later, and only those that matter run."""
