"""`art.errors` under hone's name: the exceptions that hone raises."""

from hone.errors import *  # noqa: F403  # all of them, also those that are added later
