"""vLLM sampling on a CPU, in the environment bench/peer_env.py makes; with an adapter or without.

In:   prompts as token ids
Out:  how long it took, and how many tokens came out

Chosen in its favour: prefix caching in blocks small enough for the prompts, no text is made of the
tokens, no process between caller and engine, its own compiler where it has one, all cores.
"""

from time import perf_counter
from typing import Any

from bench.process import serve


def start(settings: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    adapter = settings["adapter"]
    options: dict[str, Any] = {}
    if adapter is not None:
        options = {"enable_lora": True, "max_lora_rank": settings["rank"], "max_loras": 1}
    engine = LLM(
        settings["model"],
        dtype="float32",
        max_model_len=settings["max_tokens"],
        max_num_seqs=settings["max_rows"],
        enable_prefix_caching=True,
        block_size=settings["block_size"],
        skip_tokenizer_init=True,
        seed=0,
        **options,
    )
    lora = None if adapter is None else LoRARequest("bench", 1, adapter)

    def rollout(request: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            n=request["n"],
            temperature=1.0,
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        started = perf_counter()
        outputs = engine.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
        seconds = perf_counter() - started
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {"seconds": seconds, "tokens": tokens}

    return rollout


if __name__ == "__main__":
    serve(start)
