"""TRL's GRPO step: GRPOTrainer's own compute_loss on given tensors, then backward, clip and AdamW.

In:   groups, as sequences with advantages
Out:  seconds

A real GRPOTrainer is constructed over the same model and adapter; only its sampling is left out.
In its favour: no gradient checkpointing, which it has on by default, and no bf16, which crawls on
CPUs without units for it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from bench.process import THREADS, serve


def grpo_trainer(model: Any, tokenizer: Any, sequences: int, group_size: int, **args: Any) -> Any:
    """A GRPOTrainer over a PEFT model, ready for `compute_loss`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    with TemporaryDirectory() as out:
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(Path(out)),
                per_device_train_batch_size=sequences,
                num_generations=group_size,
                loss_type="grpo",
                beta=0.0,
                gradient_checkpointing=False,
                report_to=[],
                **args,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["x"] * sequences}),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def loss_inputs(prompt: Any, completion: Any, advantages: Any) -> dict[str, Any]:
    """Inputs of `compute_loss`. Prompts and completions have one length each: nothing is padded."""
    import torch

    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(float(completion.numel())),
    }


def start(settings: dict[str, Any]) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(THREADS)
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    peft: Any = PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings["model"])
    sizes = settings["sequences"], settings["group_size"]
    trainer = grpo_trainer(peft, tokenizer, *sizes, bf16=False, use_cpu=True)
    model = trainer.model
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)

    def train(request: dict[str, Any]) -> dict[str, Any]:
        rows = request["sequences"]
        started = perf_counter()
        prompt = torch.tensor([row["ids"][: row["prompt"]] for row in rows])
        completion = torch.tensor([row["ids"][row["prompt"] :] for row in rows])
        advantages = torch.tensor([row["advantage"] for row in rows])
        optimizer.zero_grad(set_to_none=True)
        trainer.compute_loss(model, loss_inputs(prompt, completion, advantages)).backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        seconds = perf_counter() - started
        return {"seconds": seconds, "tokens": sum(len(row["ids"]) for row in rows)}

    return train


if __name__ == "__main__":
    serve(start)
