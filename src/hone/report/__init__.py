"""Report what a run did, as text, numbers and plots; reads only the run directory."""
