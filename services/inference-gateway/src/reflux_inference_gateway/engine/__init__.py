"""The embedded torch engine: the only part of this package that imports torch."""
