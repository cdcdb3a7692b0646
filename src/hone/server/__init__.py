"""Serve, train, remember: HTTP in front of engine and learner."""
