"""`python -m bench.peers.trl_step --model DIR`: whole GRPO steps of TRL, with vLLM in its own process.

In:   a model directory, on a machine with a GPU, TRL and vLLM in one environment
Out:  one JSON object per step: seconds of the rollouts, of the weight transfer to vLLM, and in all

The same groups, prompts and lengths as `bench.gpu_cycle --only step`, the same rank and layers. In
TRL's favour: no gradient checkpointing, which it has on by default, and vLLM never sleeps.
"""

import argparse
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu import ALPHA, RANK
from bench.gpu_serve import STEP_PROMPT_WORDS, prompts, say


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.trl_step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=STEP_PROMPT_WORDS)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a forward pass")
    parser.add_argument("--repeats", type=int, default=3, help="the first warms up")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3, help="of vLLM")
    options = parser.parse_args()
    with TemporaryDirectory() as out:
        trainer = _trainer(options, out)
        spent: dict[str, float] = {}
        generation = trainer.vllm_generation
        generation.generate = _timed(generation.generate, spent, "rollout_s")
        generation.sync_weights = _timed(generation.sync_weights, spent, "publish_s")
        trainer.add_callback(_step_times(spent))
        trainer.train()


def _trainer(options: argparse.Namespace, out: str) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    chats = [
        [{"role": "user", "content": text}]
        for repeat in range(options.repeats)
        for text in prompts(options.prompt_words, options.groups, seed=repeat)
    ]
    return GRPOTrainer(
        model=options.model,
        reward_funcs=_alternate,
        args=GRPOConfig(
            output_dir=out,
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.groups * options.rollouts // options.batch,
            num_generations=options.rollouts,
            max_completion_length=options.answer_tokens,
            max_steps=options.repeats,
            shuffle_dataset=False,
            learning_rate=1e-4,
            beta=0.0,
            gradient_checkpointing=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=options.gpu_memory_utilization,
            vllm_max_model_length=2048,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": chats}),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


def _alternate(completions: list[Any], **_: Any) -> list[float | None]:
    return [float(i % 2) for i in range(len(completions))]


def _timed(call: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    import torch

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.synchronize()
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    return timed


def _step_times(spent: dict[str, float]) -> Any:
    import torch
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            total = time.perf_counter() - self.began
            rest = total - sum(spent.values())
            say("TRL GRPO step", repeat=state.global_step - 1, **spent, train_s=rest, step_s=total)
            spent.clear()

    return StepTimes()


if __name__ == "__main__":
    main()
