"""Files on disk, without secrets: durable writes, locks, logs, the events of a run, its rollouts."""
