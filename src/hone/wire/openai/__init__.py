"""OpenAI's dialects: chat completions, completions and responses."""
