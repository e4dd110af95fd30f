"""Crystal structure prediction on the AFLOW prototypes: from a composition to a structure."""
