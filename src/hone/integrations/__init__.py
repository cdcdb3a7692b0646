"""Guests: other toolkits, agent frameworks, services and file formats. Only the composition root and the command line import them."""
