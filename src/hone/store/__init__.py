"""What the server must remember: one SQLite file and the checkpoints beside it."""
