"""Send a run to the loggers of its YAML: the protocol, the feed and the processes."""
