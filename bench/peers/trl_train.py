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


def start(settings: dict[str, Any]) -> Any:
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    torch.set_num_threads(THREADS)
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    peft: Any = PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True)
    with TemporaryDirectory() as out:
        trainer: Any = GRPOTrainer(
            model=peft,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(Path(out)),
                per_device_train_batch_size=settings["sequences"],
                num_generations=settings["group_size"],
                loss_type="grpo",
                beta=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["x"] * settings["sequences"]}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(settings["model"]),
        )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)

    def train(request: dict[str, Any]) -> dict[str, Any]:
        rows = request["sequences"]
        started = perf_counter()
        # Prompts and completions of one length each: nobody pads.
        prompt = torch.tensor([row["ids"][: row["prompt"]] for row in rows])
        completion = torch.tensor([row["ids"][row["prompt"] :] for row in rows])
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
            "advantages": torch.tensor([row["advantage"] for row in rows]),
            "num_items_in_batch": torch.tensor(float(completion.numel())),
        }
        optimizer.zero_grad(set_to_none=True)
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        seconds = perf_counter() - started
        return {"seconds": seconds, "tokens": sum(len(row["ids"]) for row in rows)}

    return train


if __name__ == "__main__":
    serve(start)
