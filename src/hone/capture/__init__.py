"""See every model call the agent makes."""
