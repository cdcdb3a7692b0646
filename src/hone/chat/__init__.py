"""Messages to token ids and back, without an engine."""
