"""YAML in, validated components out; problems with file and line."""
