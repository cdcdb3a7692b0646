"""Score rollouts: datasets, evaluators, and one run of both."""
