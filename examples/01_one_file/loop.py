"""GRPO in one file: a small model learns to answer requests with a JSON tool call.

In:   a model's name or directory, and the task in task.py
Out:  a table on the screen; reward.png and result.json in --out

    for every step:  sample a group of answers to each of a few requests
                     reward each answer; its advantage is its reward relative to its group
                     raise the probability of tokens in better answers, lower it in worse ones

Only the model files come from hone. Tests compare hone's learner with this file: loss and gradient
must agree. The two share no code, because a shared bug would not show.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import picture
import task
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from hone.models.find import find

Ids = list[list[int]]
COLUMNS = ("step", "reward", "exact", "tokens/s", "seconds")
LEARNING_RATE = 1e-3  # at the first step; it decays linearly to zero
MAX_TOKENS = 18  # the longest correct answer has 15


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, zero at the start."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale


def add_lora(model: Any) -> list[nn.Parameter]:
    """Freeze the model and wrap every linear layer of its blocks; returns the trainable parameters."""
    model.requires_grad_(False)
    for block in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LoraLinear(child))
    return [p for p in model.parameters() if p.requires_grad]


def read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache, keep: int = 0) -> Tensor:
    """Logits of ids [B, T], which continue the cached tokens; mask [B, cached + T], 0 = padding."""
    places = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    return model(ids, mask, places, cache, use_cache=True, logits_to_keep=keep).logits


def read_prompts(model: Any, prompts: Ids, group: int) -> tuple[DynamicCache, Tensor, Tensor]:
    """Cache, mask and last token of every prompt, each repeated `group` times."""
    # The common prefix is computed once, the rest once per prompt; gradients flow through both.
    shared = min(map(len, prompts)) - 2
    while any(prompt[:shared] != prompts[0][:shared] for prompt in prompts):
        shared -= 1
    # The last token is not cached: its logits determine the first token of an answer.
    ids = pad_sequence([torch.tensor(prompt[shared:-1]) for prompt in prompts], batch_first=True)
    mask = pad_sequence([torch.ones(len(p) - 1).long() for p in prompts], batch_first=True)
    cache = DynamicCache()
    if shared:
        read(model, torch.tensor([prompts[0][:shared]]), mask[:1, :shared], cache, keep=1)
        cache.batch_repeat_interleave(len(prompts))
    read(model, ids, mask, cache, keep=1)
    cache.batch_repeat_interleave(group)
    last = torch.tensor([prompt[-1:] for prompt in prompts])
    return cache, mask.repeat_interleave(group, 0), last.repeat_interleave(group, 0)


@torch.no_grad()
def sample(model: Any, prompts: Ids, group: int, stop: int, temperature: float = 1.0) -> Ids:
    """`group` answers to every prompt, including the stop token; temperature 0 is greedy."""
    cache, mask, token = read_prompts(model, prompts, group)
    answers = token[:, :0]
    while answers.shape[1] < MAX_TOKENS and not (answers == stop).any(1).all():
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        logits = read(model, token, mask, cache)[:, -1]
        if temperature > 0:  # with Gumbel noise, argmax samples from softmax(logits / temperature)
            logits = logits / temperature - torch.empty_like(logits).exponential_().log()
        token = logits.argmax(-1, keepdim=True)
        answers = torch.cat([answers, token], 1)
    return [row[: row.index(stop) + 1] if stop in row else row for row in answers.tolist()]


def advantages(rewards: list[float], group: int) -> Tensor:
    """[prompts, group]: (reward - group mean) / group standard deviation; 0 if all are equal."""
    rows = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    centred = rows - rows.mean(1, keepdim=True)
    flat = rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True)
    return (centred / (rows.std(1, keepdim=True, correction=0) + 1e-6)).masked_fill(flat, 0.0)


def logprobs(model: Any, prompts: Ids, answers: Ids) -> list[Tensor]:
    """Log-probability of every token of every answer, with gradients."""
    cache, mask, last = read_prompts(model, prompts, len(answers) // len(prompts))
    ids = pad_sequence([torch.tensor(answer) for answer in answers], batch_first=True)
    fed = torch.cat([last, ids[:, :-1]], 1)
    logits = read(model, fed, torch.cat([mask, torch.ones_like(fed)], 1), cache)
    of_token = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return [row[: len(answer)] for row, answer in zip(of_token, answers, strict=True)]


def loss(new: list[Tensor], advantage: list[float]) -> Tensor:
    """GRPO: the mean over rollouts of the mean over their tokens of -ratio x advantage."""
    # One optimizer step per batch: old and new policy are equal, the ratio is 1, nothing is clipped.
    ratios = [(row - row.detach()).exp() for row in new]
    terms = [-(ratio * a).mean() for ratio, a in zip(ratios, advantage, strict=True)]
    return torch.stack(terms).mean()


def batch_loss(model: Any, prompts: Ids, answers: Ids, rewards: list[float]) -> Tensor | None:
    """The loss of one group of answers per prompt; None if the rewards of every group are equal."""
    group = len(answers) // len(prompts)
    scored = advantages(rewards, group)
    # A group with equal rewards carries no signal: exclude it instead of averaging in zeros.
    used = scored.any(1).nonzero()[:, 0].tolist()
    if not used:
        return None
    batch = [answers[i * group + j] for i in used for j in range(group)]
    return loss(logprobs(model, [prompts[i] for i in used], batch), scored[used].flatten().tolist())


def train(model: Any, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """One row of the table per step."""
    torch.manual_seed(args.seed)
    requests = task.stream(args.seed)
    parameters = add_lora(model)
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        items = [next(requests) for _ in range(args.prompts_per_step)]
        prompts = [task.encode(tokenizer, item) for item in items]
        answers = sample(model, prompts, args.group, tokenizer.eos_token_id)
        sampled_s = time.perf_counter() - start
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        pairs = [(text, items[r // args.group]) for r, text in enumerate(texts)]
        rewards = [task.reward(text, item) for text, item in pairs]
        if (value := batch_loss(model, prompts, answers, rewards)) is not None:
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (step - 1) / args.steps)
            optimizer.step()
        exact = [task.exact(text, item) for text, item in pairs]
        speed, spent = sum(map(len, answers)) / sampled_s, time.perf_counter() - start
        row = (step, sum(rewards) / len(rewards), sum(exact) / len(exact), speed, spent)
        print("{:4d}{:8.2f}{:7.2f}{:10.0f}{:9.1f}".format(*row), flush=True)
        yield dict(zip(COLUMNS, row, strict=True))


def heldout(model: Any, tokenizer: Any) -> dict[str, float]:
    """Share of exact greedy answers to the held-out requests, per tool."""
    items = task.items("heldout")
    prompts = [task.encode(tokenizer, item) for item in items]
    answers = sample(model, prompts, 1, tokenizer.eos_token_id, temperature=0)
    scores = task.scores(tokenizer.batch_decode(answers, skip_special_tokens=True), items)
    unseen = f"{task.UNSEEN}, never trained: {scores[task.UNSEEN]:.3f}"
    print(f"held-out exact match {sum(scores.values()) / len(scores):.3f} ({unseen})", flush=True)
    return scores


def main() -> None:
    flags = argparse.ArgumentParser(description="Teach a small model to call tools, by GRPO.")
    flags.add_argument("--model", default="smollm2-135m-instruct", help="a name or a directory")
    flags.add_argument("--out", type=Path, default=Path(__file__).with_name("out"))
    for flag, default in {"steps": 10, "seed": 0, "prompts-per-step": 5, "group": 8}.items():
        flags.add_argument(f"--{flag}", type=int, default=default)
    args = flags.parse_args()
    start = time.perf_counter()
    logging.disable_progress_bar()
    path = find(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = heldout(model, tokenizer)
    print("  ".join(COLUMNS))
    rows = list(train(model, tokenizer, args))
    after = heldout(model, tokenizer)
    picture.draw(rows, before, after, task.UNSEEN, args.out)
    print(f"{time.perf_counter() - start:.0f} s, see {args.out / 'reward.png'}")


if __name__ == "__main__":
    main()
