"""From a submitted job to a served step."""
