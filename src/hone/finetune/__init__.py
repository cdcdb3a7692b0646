"""The harness: rollouts to groups, groups to jobs, epoch by epoch."""
