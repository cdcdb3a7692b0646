"""A job in, a better adapter out."""
