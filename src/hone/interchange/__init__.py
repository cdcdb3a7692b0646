"""Trajectories of a run as files for other programs, and conversations of other programs as a dataset."""
