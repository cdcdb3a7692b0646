"""The HTTP side of the server: the app, who is let in, and the routes."""
