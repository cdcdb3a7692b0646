"""YAML in, checked objects out: components by name, problems by file and line."""
