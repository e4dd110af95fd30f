"""Backend `slurm`: every grant is one Slurm job on exactly its nodes, with one agent per node inside it."""
