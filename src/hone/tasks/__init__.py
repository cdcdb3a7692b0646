"""Run work in this process: together, again, in a loop that ends, with progress and until Ctrl-C."""
