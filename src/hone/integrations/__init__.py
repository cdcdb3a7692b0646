"""Other toolkits, agent frameworks, services and file formats; only the composition root and the command line import them."""
