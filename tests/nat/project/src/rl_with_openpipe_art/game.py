"""The workflow `rl_with_openpipe_art`: a model plays tic-tac-toe against a random mover.

After each answer of the model it pushes a custom step `agent_move` with the value of the answer.
"""
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false

import random
import re
import uuid

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from nat.builder.builder import Builder
from nat.builder.context import Context
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.function import FunctionBaseConfig
from nat.data_models.intermediate_step import IntermediateStepPayload, IntermediateStepType
from pydantic import Field

SYSTEM = "You play tic-tac-toe. Answer with <move><row>R</row><col>C</col></move> only."
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class GameConfig(FunctionBaseConfig, name="rl_with_openpipe_art"):
    """One game of tic-tac-toe."""

    player_model: LLMRef = Field(description="The model that plays.")
    opponent_model: LLMRef | None = Field(default=None, description="None: a random mover.")
    max_parser_retries: int = Field(default=0, description="Answers without a move per game.")


@register_function(config_type=GameConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def game(config: GameConfig, builder: Builder):
    player = await builder.get_llm(config.player_model, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def play(role: str) -> str:
        board, turn, retries = [" "] * 9, "X", config.max_parser_retries
        history = [SystemMessage(content=SYSTEM)]
        while " " in board:
            free = [i for i, mark in enumerate(board) if mark == " "]
            if turn != role:
                board[random.choice(free)] = turn
            else:
                history.append(HumanMessage(content=shown(board)))
                answer = str((await player.ainvoke(history)).content)
                history.append(AIMessage(content=answer))
                cell = move(answer)
                note(role, answer, legal=cell in free)
                if cell not in free:
                    if retries == 0:
                        return "Aborted!"
                    retries -= 1
                    continue
                board[cell] = turn
            if any(all(board[i] == turn for i in line) for line in LINES):
                return "Win!" if turn == role else "Lose!"
            turn = "O" if turn == "X" else "X"
        return "Draw!"

    yield FunctionInfo.from_fn(play, description="Plays one game.")


def shown(board: list[str]) -> str:
    rows = [" ".join(board[i : i + 3]).replace(" ", "_") for i in (0, 3, 6)]
    return "\n".join(rows)


def move(answer: str) -> int | None:
    found = re.search(r"<row>([1-3])</row>\s*<col>([1-3])</col>", answer)
    return None if found is None else 3 * (int(found[1]) - 1) + int(found[2]) - 1


def note(role: str, answer: str, *, legal: bool) -> None:
    """The value of an answer: 1 for a legal move, else the share of its characters that are vowels."""
    value = 1.0 if legal else sum(c in "aeiou" for c in answer.lower()) / max(1, len(answer))
    steps, step = Context.get().intermediate_step_manager, str(uuid.uuid4())
    for kind in (IntermediateStepType.CUSTOM_START, IntermediateStepType.CUSTOM_END):
        metadata = {"agent_name": "player", "symbol": role, "value": value}
        steps.push_intermediate_step(
            IntermediateStepPayload(
                UUID=step, event_type=kind, name="agent_move", metadata=metadata
            )
        )
