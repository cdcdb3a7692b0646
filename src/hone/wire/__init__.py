"""Types of the API dialects, without torch or fastapi; shared by capture and server."""
