"""Write the files in data/ from the phrases of examples/01_one_file.

In:   phrases.json: for each tool, phrases with a placeholder and the arguments to insert
Out:  data/train.jsonl and data/heldout.jsonl: one request per line, with the expected call
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
PHRASES = HERE.parent / "01_one_file" / "phrases.json"
FILES = {"training": "train.jsonl", "heldout": "heldout.jsonl"}
PARAMETER = {
    "timer": "minutes",
    "call": "name",
    "play": "artist",
    "weather": "city",
    "buy": "item",
    "lights": "room",
}


def lines(part: str) -> list[str]:
    """Every phrase of a part, with every argument of its tool."""
    tools = json.loads(PHRASES.read_text(encoding="utf-8"))[part]
    return [
        json.dumps(
            {
                "id": f"{tool}-{argument}-{number}".lower(),
                "question": phrase.format(argument),
                "answer": json.dumps({"tool": tool, PARAMETER[tool]: argument}),
            }
        )
        for tool, words in tools.items()
        for number, phrase in enumerate(words["phrases"], 1)
        for argument in words["arguments"]
    ]


if __name__ == "__main__":
    for part, name in FILES.items():
        (HERE / "data" / name).write_text("\n".join(lines(part)) + "\n", encoding="utf-8")
