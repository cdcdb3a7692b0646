"""A GRPO step on transformers and PEFT as one would write it: right-padded batches, full logits.

In:   groups, as sequences with advantages; `logits_to_keep`: logits of the completions alone;
      `micro_batch`: so many sequences at a time, gradients added up
Out:  seconds for forward, backward, clip and AdamW; resident bytes
"""

from time import perf_counter
from typing import Any

from bench.process import THREADS, serve
from bench.rss import peak_bytes, reset_peak, resident_bytes


def start(settings: dict[str, Any]) -> Any:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True).train()
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    # Mapped weights are resident once they were read; loaded means all of them.
    for weight in model.parameters():
        weight.detach().sum()
    loaded = resident_bytes()

    def loss(
        ids: Tensor, mask: Tensor, labelled: Tensor, advantage: Tensor, old: Tensor, keep: int
    ) -> Tensor:
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep)
        logits, labelled, old = output.logits[:, :-1], labelled[:, 1 - keep :], old[:, 1 - keep :]
        new = logits.log_softmax(-1).gather(-1, ids[:, 1 - keep :, None])[..., 0]
        ratio = torch.exp(new - new.detach())
        gain = advantage[:, None]
        term = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        term = term * torch.exp(new.detach() - old).clamp(max=2.0)
        return ((term * labelled).sum(1) / labelled.sum(1)).mean()

    def train(request: dict[str, Any]) -> dict[str, Any]:
        rows = request["sequences"]
        longest = max(len(row["ids"]) for row in rows)
        reset_peak()
        started = perf_counter()
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask, labelled = torch.zeros_like(ids), torch.zeros(len(rows), longest - 1)
        old = torch.zeros_like(labelled)
        for i, row in enumerate(rows):
            size, prompt = len(row["ids"]), row["prompt"]
            ids[i, :size] = torch.tensor(row["ids"])
            mask[i, :size] = 1
            labelled[i, prompt - 1 : size - 1] = 1
            old[i, prompt - 1 : size - 1] = torch.tensor(row["logprobs"])
        advantage = torch.tensor([row["advantage"] for row in rows])
        optimizer.zero_grad(set_to_none=True)
        first = min(row["prompt"] for row in rows)
        keep = longest - first + 1 if settings.get("logits_to_keep") else longest
        size = settings.get("micro_batch") or len(rows)
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            part = loss(ids[some], mask[some], labelled[some], advantage[some], old[some], keep)
            (part * len(ids[some]) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        seconds = perf_counter() - started
        tokens = sum(len(row["ids"]) for row in rows)
        return {"seconds": seconds, "tokens": tokens, "loaded": loaded, "peak": peak_bytes()}

    return train


if __name__ == "__main__":
    serve(start)
