"""Write shop.json and the questions in data/.

In:   the goods and the ways to ask for them, below
Out:  shop.json: price and stock of each item; data/train.jsonl and data/heldout.jsonl
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
GOODS = {
    "train": "lamp kettle bowl spoon mirror rug vase clock towel candle basket broom pillow mug "
    "plate bucket ladder teapot",
    "heldout": "desk stool jug bench curtain tray shelf comb",
}
QUESTIONS = {
    "train": {
        "price": [
            "How much is a {}?",
            "What is the price of a {}?",
            "What would I pay for a {}?",
            "Tell me what a {} costs.",
            "I want to buy a {}. What does it cost?",
            "A {}, please. How much is that?",
        ],
        "stock": [
            "How many {}s are left?",
            "How many {}s do you have?",
            "Count the {}s for me.",
            "Tell me how many {}s there are.",
            "Do you have a {}? How many?",
            "I need many {}s. How many are there?",
        ],
    },
    "heldout": {
        "price": [
            "What do you charge for a {}?",
            "Give me the price of a {}.",
            "How expensive is a {}?",
        ],
        "stock": [
            "How many {}s can I get?",
            "What number of {}s is in store?",
            "Are there {}s? How many?",
        ],
    },
}


def shop() -> dict[str, dict[str, int]]:
    numbers = random.Random(0)
    goods = " ".join(GOODS.values()).split()
    return {
        item: {"price": numbers.randint(11, 99), "stock": numbers.randint(11, 99)} for item in goods
    }


def questions(part: str) -> list[dict[str, str]]:
    """Every question about every item, with the right call and the number it returns."""
    return [
        {
            "id": f"{tool}-{item}-{number}",
            "question": question.format(item),
            "answer": json.dumps({"tool": tool, "item": item, "number": shop()[item][tool]}),
        }
        for tool, ways in QUESTIONS[part].items()
        for number, question in enumerate(ways, 1)
        for item in GOODS[part].split()
    ]


if __name__ == "__main__":
    (HERE / "shop.json").write_text(json.dumps(shop(), indent=1) + "\n", encoding="utf-8")
    for part in QUESTIONS:
        lines = "".join(json.dumps(row) + "\n" for row in questions(part))
        (HERE / "data" / f"{part}.jsonl").write_text(lines, encoding="utf-8")
