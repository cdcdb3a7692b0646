"""The server's persistent state: one SQLite file and the checkpoints beside it."""
