"""Where training happens."""
