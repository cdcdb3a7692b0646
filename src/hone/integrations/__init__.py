"""Guests: other toolkits, agent frameworks, services and file formats."""
