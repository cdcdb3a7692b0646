"""Run the user's agent."""
