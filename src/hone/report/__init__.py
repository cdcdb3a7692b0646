"""What a run did, in words, numbers and plots: reads the run directory and nothing else."""
