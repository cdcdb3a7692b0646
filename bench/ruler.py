"""`python -m bench.ruler`: how often RULER ranks the demo's answers as its written reward does.

In:   requests of examples/02_tool_calls; answers that the untrained model samples for them
Out:  one JSON object on stdout: for each judge the agreement with the reward `graded`

Two judges get the same groups: a scripted one, which checks tool and argument against the request
and does not know the expected call, and SmolLM2-135M, the untrained policy itself, over hone's
server. `pairs` is the share of pairs with different written rewards that the judge orders in the
same way, where equal scores count half: 0.5 is chance. `best` is the share of groups in which the
answer that the judge scores highest has the highest written reward.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from statistics import fmean
from typing import Any

import hone
from bench.process import ROOT
from hone.art.rewards import ruler
from hone.errors import RolloutError
from hone.workflow.target import load_target

HERE = ROOT / "examples" / "02_tool_calls"
AGENT = load_target("agent.py:call_a_tool", HERE, where="bench.ruler").__globals__
graded = load_target("reward.py:graded", HERE, where="bench.ruler")
BASE = "smollm2-135m-instruct"
TOOLS = {"timer": "minutes", "call": "name", "play": "artist", "weather": "city", "buy": "item"}
RUBRIC = (
    "The assistant must answer the last request with one JSON object: the right tool, and its "
    "argument taken from the request. Nothing else may be in the answer. Partial credit for a JSON "
    "object with the wrong tool or argument; no credit for prose."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ruler", description=__doc__)
    parser.add_argument("--groups", type=int, default=24, help="requests")
    parser.add_argument("--generations", type=int, default=6, help="answers to each request")
    options = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(_measure(options.groups, options.generations)), indent=1))
    return 0


async def _measure(count: int, generations: int) -> dict[str, Any]:
    lines = (HERE / "data" / "train.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: max(1, len(lines) // count)][:count]]
    with tempfile.TemporaryDirectory() as root, scripted_judge() as scripted:
        async with hone.LocalBackend(path=root) as backend:
            model = hone.TrainableModel(name="policy", project="ruler", base_model=BASE)
            await model.register(backend)
            groups = [await _answers(model, row, generations) for row in rows]
            rewards = [
                [graded(text, row["answer"]) for text in texts]
                for row, texts in zip(rows, groups, strict=True)
            ]
            near = {"api_base": str(model.inference_base_url), "api_key": model.inference_api_key}
            judges = {
                "scripted": ("scripted", {"api_base": scripted}),
                BASE: (
                    f"{model.get_inference_name()}@0",
                    near | {"temperature": 0, "max_tokens": 900},
                ),
            }
            conversations = [
                [[*_request(row), {"role": "assistant", "content": text}] for text in texts]
                for row, texts in zip(rows, groups, strict=True)
            ]
            return {
                "groups": len(rows),
                "generations": generations,
                "mean_written_reward": round(fmean(r for group in rewards for r in group), 3),
                "judges": {
                    name: await _agreement(conversations, rewards, *judge)
                    for name, judge in judges.items()
                },
            }


def _request(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": AGENT["SYSTEM"]},
        *AGENT["EXAMPLE"],
        {"role": "user", "content": row["question"]},
    ]


async def _answers(model: hone.TrainableModel, row: dict[str, Any], count: int) -> list[str]:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=_request(row),  # pyright: ignore[reportArgumentType]
        n=count,
        max_tokens=18,
        temperature=1.0,
        seed=0,
    )
    return [choice.message.content or "" for choice in answer.choices]


async def _agreement(
    groups: Sequence[Sequence[Any]],
    rewards: Sequence[Sequence[float]],
    judge: str,
    params: dict[str, Any],
) -> dict[str, Any]:
    """How one judge's scores agree with the written rewards."""
    pairs: list[float] = []
    best: list[float] = []
    failed = 0
    for conversations, written in zip(groups, rewards, strict=True):
        try:
            ranked = await ruler(conversations, judge, params, RUBRIC)
        except RolloutError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        scores = [one.score for one in ranked]
        both = list(zip(scores, written, strict=True))
        for (score, reward), (other, its) in combinations(both, 2):
            if reward != its:
                pairs.append(0.5 if score == other else float((score > other) == (reward > its)))
        if len(set(written)) > 1:
            top = [reward for score, reward in both if score == max(scores)]
            best.append(fmean(float(reward == max(written)) for reward in top))
    return {
        "pairs": round(fmean(pairs), 3) if pairs else None,
        "best": round(fmean(best), 3) if best else None,
        "compared_pairs": len(pairs),
        "groups_without_scores": failed,
    }


@contextmanager
def scripted_judge() -> Iterator[str]:
    """An OpenAI API that scores trajectories by rules; its base URL."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": _verdict(body["messages"][1]["content"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted"}
            content = json.dumps(answer | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _verdict(prompt: str) -> str:
    messages = [
        json.loads(line) for line in prompt.splitlines() if line.startswith('{"role": "user"')
    ]
    request = messages[-1]["content"]
    blocks = re.findall(r'<trajectory id="(\d+)">\n(.*?)\n</trajectory>', prompt, re.DOTALL)
    scores = {}
    for id, block in blocks:
        answer = json.loads(block.splitlines()[-1])["content"]
        scores[id] = {"explanation": "by rules", "score": _rule(answer, request)}
    return json.dumps({"scores": scores})


def _rule(answer: str, request: str) -> float:
    """0.2 for a JSON object, 0.4 for a known tool with its parameter, 0.4 for a value of the request."""
    try:
        call = json.loads(answer)
    except ValueError:
        return 0.0
    if not isinstance(call, dict):
        return 0.0
    parameter = TOOLS.get(str(call.pop("tool", None)))
    fits = list(call) == [parameter]
    stated = len(call) == 1 and str(next(iter(call.values()))).lower() in request.lower()
    return round(0.2 + 0.4 * fits + 0.4 * stated, 1)


if __name__ == "__main__":
    sys.exit(main())
