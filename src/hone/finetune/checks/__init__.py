"""Before the first epoch: check the configuration and the data, plan the run, try it on one example."""
