"""The services and files that a run is sent to."""
