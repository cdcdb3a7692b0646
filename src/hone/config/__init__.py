"""Turn YAML into validated components; report problems with file and line."""
