"""Messages to token ids and back; no engine in sight."""
