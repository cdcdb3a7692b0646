"""Side by side with the peers: how fast hone samples, learns and publishes, and in how much memory."""
