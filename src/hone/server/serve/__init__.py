"""From a request to its recorded call."""
