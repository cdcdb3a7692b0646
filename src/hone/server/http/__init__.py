"""The HTTP side of the server: the app, who is let in, limits, and the routes."""
