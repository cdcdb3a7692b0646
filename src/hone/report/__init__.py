"""What a run did, told and drawn: reads the run directory and nothing else."""
