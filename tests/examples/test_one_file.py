"""examples/01_one_file: its task is what it claims, its loop is right, and the learner agrees.

The loop is written without hone's decoder, trie and loss, on transformers' own forward pass and
cache. So where both give one number, one gradient and one step, both are right or both are wrong
in the same way by chance.
"""

import importlib.util
import json
import math
import re
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.learner.learner import Learner
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

FOLDER = Path(__file__).parents[2] / "examples" / "01_one_file"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task() -> Any:
    return _module("task")


@pytest.fixture(scope="module")
def loop(task: Any) -> Any:
    _module("picture")
    return _module("loop")


def test_it_is_one_readable_file_that_borrows_only_the_loader():
    text = (FOLDER / "loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert re.findall(r"^\s*(?:from|import) (hone\S*)", text, re.M) == ["hone.models.find"]


# The task


def test_enough_tools_and_requests(task: Any):
    training, heldout = task.items("training"), task.items("heldout")
    assert len({item.tool for item in training}) >= 5
    assert len({item.request for item in training}) == len(training) >= 200
    assert len({item.request for item in heldout}) == len(heldout) >= 64
    # The loop reports the mean over tools as the share of all requests.
    assert len(set(Counter(item.tool for item in heldout).values())) == 1


def test_heldout_requests_are_new_in_phrase_argument_and_tool(task: Any):
    phrases = json.loads((FOLDER / "phrases.json").read_text(encoding="utf-8"))

    def every(part: str, field: str) -> set[Any]:
        return {(tool, x) for tool, words in phrases[part].items() for x in words[field]}

    def shapes(part: str) -> set[str]:
        return {phrase for _, phrase in every(part, "phrases")}

    assert not shapes("training") & shapes("heldout")
    assert all("{}" in phrase for phrase in shapes("training") | shapes("heldout"))
    # New in kind, too: commands and statements are trained, questions are held out.
    assert all(phrase.endswith("?") for phrase in shapes("heldout"))
    assert not any("?" in phrase for phrase in shapes("training"))
    assert not every("training", "arguments") & every("heldout", "arguments")
    assert set(phrases["heldout"]) - set(phrases["training"]) == {task.UNSEEN}
    assert all(task.UNSEEN not in item.request for item in task.items("training"))
    assert all(task.UNSEEN not in str(item.answer) for item in task.items("training"))


def test_the_prompt_describes_every_tool_and_shows_one_trained_one(task: Any):
    for tool, parameter in task.PARAMETER.items():
        assert f'{{"tool": "{tool}", "{parameter}": X}}' in task.SYSTEM
    request, answer = task.EXAMPLE
    shown = json.loads(answer)
    assert shown["tool"] != task.UNSEEN
    items = task.items("training") + task.items("heldout")
    assert request not in {item.request for item in items}
    assert shown not in [item.answer for item in items]
    roles = [message["role"] for message in task.prompt(items[0])]
    assert roles == ["system", "user", "assistant", "user"]


def test_every_round_of_the_stream_has_every_trained_tool(task: Any):
    stream = task.stream(3)
    rounds = [[next(stream).tool for _ in range(5)] for _ in range(4)]
    assert all(sorted(tools) == sorted(set(task.PARAMETER) - {task.UNSEEN}) for tools in rounds)
    assert len({tuple(tools) for tools in rounds}) > 1
    again, other = task.stream(3), task.stream(4)
    same = [next(again) for _ in range(20)]
    assert [item.tool for item in same] == [tool for tools in rounds for tool in tools]
    assert same != [next(other) for _ in range(20)]


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"tool": "timer", "minutes": 12}', 1.0),
        (' {"minutes":12,"tool":"timer"}\n', 1.0),
        ('{"tool": "timer", "minutes": 13}', 0.5),
        ('{"tool": "timer", "minutes": "12"}', 0.5),
        ('{"tool": "timer", "minutes": 12.0}', 0.5),
        ('{"tool": "timer", "minutes": 12, "name": "tea"}', 0.3),
        ('{"tool": "timer", "seconds": 12}', 0.3),
        ('{"tool": "call", "minutes": 12}', 0.1),
        ('{"tool": ["timer"], "minutes": 12}', 0.1),
        ("{}", 0.1),
        ('["timer", 12]', 0.0),
        ("null", 0.0),
        ("12", 0.0),
        ("", 0.0),
        ('Sure: {"tool": "timer", "minutes": 12}', 0.0),
        ('{"tool": "timer", "minutes": 12}}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_reward_by_hand(task: Any, text: str, worth: float):
    item = task.Item("Set a timer for 12 minutes.", "timer", 12)
    assert task.reward(text, item) == worth
    assert task.exact(text, item) == (worth == 1.0)


def test_true_is_not_one(task: Any):
    assert not task.exact('{"tool": "timer", "minutes": true}', task.Item("1", "timer", 1))


def test_scores_by_hand(task: Any):
    items = [task.Item("", "call", "Ann"), task.Item("", "call", "Bo"), task.Item("", "buy", "tea")]
    texts = ['{"tool": "call", "name": "Ann"}', '{"tool": "call", "name": "Ann"}', "tea"]
    assert task.scores(texts, items) == {"call": 0.5, "buy": 0.0}


# The loop, on a tiny model in float64


@pytest.fixture
def model(loop: Any, tiny_llama_dir: Path) -> Any:
    """With adapters that do something: B is not zero, so that A has a gradient."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in loop.add_lora(llama):
            torch.nn.init.normal_(parameter, std=0.05)
    return llama


PROMPTS = [[1, 5, 9, 20, 7], [1, 5, 9, 33, 34, 35, 7], [1, 5, 80, 7]]
ANSWERS = [
    [[11, 12, 2], [11, 2], [13, 14, 15, 16], [11, 12, 2]],
    [[40, 41, 2], [42, 2], [43, 2], [44, 45, 46, 47, 2]],
    [[50, 2], [51, 2], [52, 2], [53, 2]],
]
REWARDS = [[1.0, 0.1, 0.0, 1.0], [0.3, 0.3, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]]


def flat(nested: list[list[Any]]) -> list[Any]:
    return [x for inner in nested for x in inner]


def test_sharing_prompts_changes_nothing(loop: Any, model: Any):
    shared = loop.logprobs(model, PROMPTS, flat(ANSWERS))
    for (prompt, answer), ours in zip(
        [(p, a) for p, answers in zip(PROMPTS, ANSWERS, strict=True) for a in answers],
        shared,
        strict=True,
    ):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_prompts_may_have_nothing_in_common(loop: Any, model: Any):
    one, two = loop.logprobs(model, [[3, 4, 5], [6, 7]], [[8, 2], [9, 2]])
    for prompt, answer, ours in ([3, 4, 5], [8, 2], one), ([6, 7], [9, 2], two):
        (theirs,) = loop.logprobs(model, [prompt], [answer])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_greedy_answers_are_those_of_generate(loop: Any, model: Any):
    answers = loop.sample(model, PROMPTS, 1, stop=2, temperature=0)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=loop.MAX_TOKENS,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert answer == theirs[0, len(prompt) :].tolist()


def test_samples_follow_the_distribution_and_end_at_the_stop(
    loop: Any, model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "MAX_TOKENS", 3)
    torch.manual_seed(0)
    count = 3000
    answers = loop.sample(model, [PROMPTS[0]], count, stop=2, temperature=1.0)
    assert len(answers) == count
    assert all(2 not in answer[:-1] and len(answer) <= loop.MAX_TOKENS for answer in answers)
    assert all(answer[-1] == 2 or len(answer) == loop.MAX_TOKENS for answer in answers)
    p = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    seen = Counter(answer[0] for answer in answers)
    for token in p.topk(5).indices.tolist():
        expected = p[token].item()
        # Five standard deviations: a right sampler fails this once in a million tokens.
        margin = 5 * math.sqrt(expected * (1 - expected) / count)
        assert seen[token] / count == pytest.approx(expected, abs=margin)


def test_advantages_by_hand(loop: Any):
    # Group 1, 0, 0, 1: mean 0.5, population deviation 0.5. A group of equal rewards says nothing.
    rows = loop.advantages([1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3], 4)
    assert rows[0].tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    assert rows[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_loss_by_hand(loop: Any):
    # Value: -(2 - 1) / 2 = -0.5. Gradient: -advantage / (tokens of the rollout x 2 rollouts).
    long = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    short = torch.tensor([-5.0], requires_grad=True)
    value = loop.loss([long, short], [2.0, -1.0])
    value.backward()
    assert value.item() == pytest.approx(-0.5)
    assert long.grad is not None and long.grad.tolist() == pytest.approx([-0.25] * 4)
    assert short.grad is not None and short.grad.tolist() == pytest.approx([0.5])


def test_equal_rewards_make_no_step(loop: Any, model: Any):
    assert loop.batch_loss(model, PROMPTS[:1], ANSWERS[0], [0.1] * 4) is None


# The oracle


def by_name(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The adapters of the loop's model under PEFT's names, with their gradients."""
    tensors = {}
    for path, module in model.named_modules():
        for part, letter in (("a", "A"), ("b", "B")):
            tensor = getattr(module, part, None)
            if isinstance(tensor, torch.nn.Parameter):
                assert tensor.grad is not None, path
                tensors[f"base_model.model.{path}.lora_{letter}.weight"] = (tensor, tensor.grad)
    return tensors


def twin(model: Any, decoder: Decoder) -> Lora:
    """The same adapters as hone holds them, in float64."""
    lora = Lora.init(decoder.config, rank=8, alpha=16.0)
    for _, tensor in lora.parameters():
        tensor.data = tensor.data.double()
    theirs = by_name(model)
    for name, tensor in lora.named():
        tensor.data.copy_(theirs.pop(name)[0].detach())
    assert not theirs, f"hone has no place for {sorted(theirs)}"
    return lora


def job(sampled: list[list[float]]) -> list[TrajectoryGroup]:
    """PROMPTS, ANSWERS and REWARDS as hone's learner is given them."""
    logprobs = iter(sampled)
    return [
        TrajectoryGroup(
            trajectories=[
                Trajectory(
                    calls=[Call(prompt_ids=prompt, completion_ids=answer, logprobs=next(logprobs))],
                    reward=reward,
                )
                for answer, reward in zip(answers, rewards, strict=True)
            ]
        )
        for prompt, answers, rewards in zip(PROMPTS, ANSWERS, REWARDS, strict=True)
    ]


def compare(learner: Learner, model: Any, groups: list[TrajectoryGroup], value: Tensor) -> None:
    """One job of the learner against the loss and the gradients the loop's model holds."""
    # The gradient is not clipped, so that it can be compared as it is.
    result = learner.train(groups, TrainConfig(learning_rate=1e-3, max_grad_norm=1e9))
    assert result.steps == 1
    assert result.metrics["learn/rollouts"] == 8  # the third group is flat
    assert result.metrics["learn/loss"] == pytest.approx(value.item(), abs=1e-6)
    ours = _gradients(learner.lora)
    theirs = {name: gradient for name, (_, gradient) in by_name(model).items()}
    norm = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    assert norm > 1e-2
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-6 * norm, name


def test_the_learner_agrees(loop: Any, model: Any, tiny_llama_dir: Path):
    value = loop.batch_loss(model, PROMPTS, flat(ANSWERS), flat(REWARDS))
    value.backward()
    sampled = [row.tolist() for row in loop.logprobs(model, PROMPTS, flat(ANSWERS))]
    decoder = Decoder.load(tiny_llama_dir, dtype=torch.float64)
    learner = Learner(decoder, twin(model, decoder), base_model="tiny")
    compare(learner, model, job(sampled), value)

    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0).step()
    # A hundredth of a step: Adam divides by the size of the gradient, however small that is.
    moved = dict(learner.lora.named())
    for name, (tensor, _) in by_name(model).items():
        torch.testing.assert_close(moved[name].detach(), tensor.detach(), rtol=0, atol=1e-5)


def test_the_learner_agrees_where_another_policy_sampled(
    loop: Any, model: Any, tiny_llama_dir: Path
):
    # On its own samples the loss is 0: ratios are 1 and advantages add up to 0. Not so here, where
    # the sampler was surer of the first token of every answer and less sure of the rest.
    new = loop.logprobs(model, PROMPTS[:2], flat(ANSWERS[:2]))
    advantage = loop.advantages(flat(REWARDS[:2]), 4).flatten().tolist()
    shifts = [torch.tensor([0.4] + [-0.9] * (len(row) - 1)) for row in new]
    sampled = [row.detach() + shift for row, shift in zip(new, shifts, strict=True)]
    # exp(-0.4) = 0.670 for the first token; exp(0.9) = 2.460 is cut at 2 for the others.
    weights = [torch.tensor([0.6703200460] + [2.0] * (len(row) - 1)).double() for row in new]
    value = loop.loss([row * weight for row, weight in zip(new, weights, strict=True)], advantage)
    value.backward()  # the gradient of weight x logprob: loss() itself gives every ratio as 1
    means = [a * weight.mean() for a, weight in zip(advantage, weights, strict=True)]
    expected = -torch.stack(means).mean()
    assert expected.abs() > 1e-2
    decoder = Decoder.load(tiny_llama_dir, dtype=torch.float64)
    learner = Learner(decoder, twin(model, decoder), base_model="tiny")
    flat_group = [[-1.0] * len(answer) for answer in ANSWERS[2]]
    compare(learner, model, job([row.tolist() for row in sampled] + flat_group), expected)


def _gradients(lora: Lora) -> dict[str, Tensor]:
    """Under PEFT's names: the leaves are wider than the tensors they hold."""
    shadow = {
        key: (a.grad, tuple(part.grad for part in b))
        for key in lora.config.adapted
        for a, b in [lora.factors(key)]
    }
    return dict(Lora(lora.config, shadow, rank=lora.rank, alpha=lora.alpha).named())  # pyright: ignore[reportArgumentType]


# The whole of it


class ByteTokenizer:
    """Bytes as ids, moved past the special ones; enough of a tokenizer for the loop."""

    eos_token_id = 2

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages[-1:])
        return {"input_ids": [1, *(byte + 3 for byte in text.encode())]}

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["".join(chr(i - 3) for i in row if 3 <= i < 131) for row in rows]


def test_the_loop_learns(
    loop: Any, task: Any, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import LlamaForCausalLM

    # What a random model can learn in seconds: to answer in bytes, which are 1 id in 4.
    monkeypatch.setattr(task, "reward", lambda text, item: len(text) / 6)
    monkeypatch.setattr(loop, "LEARNING_RATE", 5e-2)
    monkeypatch.setattr(loop, "MAX_TOKENS", 6)
    llama = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
    args = Namespace(steps=20, seed=0, prompts_per_step=4, group=8)
    rows = list(loop.train(llama, ByteTokenizer(), args))
    assert [row["step"] for row in rows] == list(range(1, 21))
    early, late = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert late > early + 0.3, rows
    scores = loop.heldout(llama, ByteTokenizer())
    assert set(scores) == set(task.PARAMETER)
    sys.modules["picture"].draw(rows, scores, scores, task.UNSEEN, tmp_path)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == rows
