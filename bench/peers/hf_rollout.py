"""transformers' `generate` with a PEFT adapter: all samples of all prompts in one batch.

In:   prompts as token ids, all of one length
Out:  how long it took, and how many tokens came out
"""

from time import perf_counter
from typing import Any

from bench.process import THREADS, serve


def start(settings: dict[str, Any]) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, settings["adapter"]).eval()

    def rollout(request: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(request["prompts"])  # one length: no padding to pay for
        started = perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=request["n"],
                max_new_tokens=request["new_tokens"],
                # No end token: everybody samples the same number of tokens.
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = perf_counter() - started
        return {"seconds": seconds, "tokens": out[:, ids.shape[1] :].numel()}

    return rollout


if __name__ == "__main__":
    serve(start)
