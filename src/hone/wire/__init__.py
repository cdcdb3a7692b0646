"""The HTTP dialects as types, without torch or fastapi; capture and server share them."""
