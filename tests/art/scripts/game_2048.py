"""A loop over games of 2048, in the style of ART's notebooks, with the import changed.

In:   argv: the base model
Out:  a line per step: the step, the loss, the number of trajectories
"""

import asyncio
import random
import re
import sys

import hone.art as art
from hone.art.local import LocalBackend

MOVES = ("left", "right", "up", "down")
SIDE = 3


def new_board(rng: random.Random) -> list[list[int]]:
    board = [[0] * SIDE for _ in range(SIDE)]
    for _ in range(2):
        add_tile(board, rng)
    return board


def add_tile(board: list[list[int]], rng: random.Random) -> None:
    free = [(row, col) for row in range(SIDE) for col in range(SIDE) if not board[row][col]]
    if free:
        row, col = rng.choice(free)
        board[row][col] = 2


def slide(line: list[int]) -> list[int]:
    """One row to the left: equal neighbours merge once."""
    tiles, merged = [tile for tile in line if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        merged.append(tile)
    return merged + [0] * (SIDE - len(merged))


def play(board: list[list[int]], move: str) -> list[list[int]]:
    turned = move in ("up", "down")
    backwards = move in ("right", "down")
    rows = [list(row) for row in zip(*board, strict=True)] if turned else board
    rows = [slide(row[::-1])[::-1] if backwards else slide(row) for row in rows]
    return [list(row) for row in zip(*rows, strict=True)] if turned else rows


@art.retry(exceptions=(ConnectionError,))
async def rollout(model: art.Model, scenario: int, turns: int = 3) -> art.Trajectory:
    rng = random.Random(scenario)
    board = new_board(rng)
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "Play 2048: left, right, up or down."}],
        reward=0,
        metadata={"scenario": scenario},
        initial_policy_version=await model.get_step(),
    )
    async with trajectory.track_duration("game"):
        for _ in range(turns):
            shown = "\n".join(" ".join(map(str, row)) for row in board)
            trajectory.messages_and_choices.append({"role": "user", "content": shown})
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(),
                messages=trajectory.messages(),  # pyright: ignore[reportArgumentType]
                max_completion_tokens=4,
            )
            choice = completion.choices[0]
            trajectory.messages_and_choices.append(choice)
            text = choice.message.content or ""
            words = re.findall("|".join(MOVES), text.lower())
            board = play(board, words[0] if words else MOVES[len(text) % 4])
            add_tile(board, rng)
            # A random model never names a move: how long it talks decides it, and the reward.
            trajectory.reward += len(text) / 10
    trajectory.metrics["max_value"] = max(map(max, board))
    return trajectory.finish()


async def main(base_model: str) -> None:
    model = art.TrainableModel(name="agent-002", project="2048", base_model=base_model)
    # To change these options is experimental in ART, and plain here.
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=512, gpu_memory_utilization=0.8),
        peft_args=art.dev.PeftArgs(r=4),
    )
    backend = LocalBackend(in_process=True, path="./.art")
    await model.register(backend)
    for _ in range(await model.get_step(), 2):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, game) for _ in range(3)) for game in range(2)),
            pbar_desc="gather",
            max_exceptions=3,
        )
        await model.log(train_groups, split="val")
        result = await model.train(
            train_groups,
            config=art.TrainConfig(learning_rate=1e-4),
            _config={"logprob_calculation_chunk_size": 8},
        )
        await model.delete_checkpoints("val/reward")
        print(result.step, result.metrics["learn/loss"], sum(map(len, train_groups)))
    model.merge_state({"games": 2})
    await model.close()
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
