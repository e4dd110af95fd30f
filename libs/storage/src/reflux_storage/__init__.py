"""Object stores with one commit protocol (create-only, compare-and-swap) and tensor streams over them."""
