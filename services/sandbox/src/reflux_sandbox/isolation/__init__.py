"""Isolation mechanisms behind one interface; each child runs one piece of work and dies."""
