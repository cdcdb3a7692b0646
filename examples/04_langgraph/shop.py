"""The shop: two tools, and the clerk's instructions.

The docstring and the arguments of a tool are what the model is told about it.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
GOODS = json.loads((HERE / "shop.json").read_text(encoding="utf-8"))
INSTRUCTIONS = (HERE / "instructions.txt").read_text(encoding="utf-8").strip()


def price(item: str) -> str:
    """What an item costs."""
    return _look_up("price", item)


def stock(item: str) -> str:
    """How many of an item are left."""
    return _look_up("stock", item)


def _look_up(what: str, item: str) -> str:
    return str(GOODS.get(item, {}).get(what, "no such item"))
