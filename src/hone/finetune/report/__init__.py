"""A run that was recorded -> what is said and drawn of it."""
