"""An agent with one model call: it reasons about a puzzle and ends with the solution.

In:   the text of a puzzle; the model being trained, as `llm`
Out:  the model's answer, unchanged
"""

from typing import Any

SYSTEM = """Solve the puzzle. Reason step by step, briefly.
End with one line: Answer: person, weapon, room, time"""


async def solve(puzzle: str, llm: Any) -> str:
    """The model's answer to one puzzle."""
    completion = await llm.client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": puzzle}],
        **llm.params,
    )
    return completion.choices[0].message.content or ""
