"""What is written to disk: durable files, locks, logs, the events of a run, its rollouts; without secrets."""
