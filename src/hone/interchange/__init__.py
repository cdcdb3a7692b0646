"""Export trajectories of a run for other programs, and import conversations as a dataset."""
