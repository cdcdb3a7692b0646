"""`python -m bench.gpu learner`: the learner on CUDA beside HF + PEFT, on random weights.

In:   which measurements (`--only`), which shapes (`--shapes`)
Out:  one JSON object per line, as soon as it is measured; a failed measurement prints its traceback
      and the next one runs

Share of the matmul rate counts what must be computed: 4 x layer parameters x tokens + 4 x head
parameters x labelled positions + 14 x attention width x layers x visible pairs, for the trie and for
the peers alike, divided by the rate of one 8,192^3 product measured in the same process.
"""

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
PROMPTS, COMPLETIONS, PROMPT, COMPLETION, ROW, TRAINED = 2, 8, 2048, 256, 8192, 2048
RANK, ALPHA = 8, 16
TILES: list[dict[str, Any]] = [
    {},
    {"ROWS_GUARANTEED_SAFE": True},
    {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True},
    *(
        {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}
        for m, n, warps, stages in (
            (128, 128, 8, 2),
            (128, 64, 4, 3),
            (128, 64, 8, 4),
            (64, 64, 4, 3),
        )
    ),
    *(
        {
            "bwd_BLOCK_M1": m1,
            "bwd_BLOCK_N1": n1,
            "bwd_BLOCK_M2": n1,
            "bwd_BLOCK_N2": m1,
            "bwd_num_warps": warps,
            "bwd_num_stages": stages,
        }
        for m1, n1, warps, stages in (
            (64, 128, 8, 3),
            (64, 128, 8, 2),
            (64, 64, 4, 3),
            (32, 128, 8, 3),
            (64, 128, 4, 3),
            (128, 128, 8, 2),
        )
    ),
]
"""Options of FlexAttention's kernels; the first is torch's default."""


class Bench:
    """The measurements of one shape on one device."""

    def __init__(
        self, name: str, device: str, repeats: int, rank: int = RANK, layers: int | None = None
    ) -> None:
        import torch

        self.name, self.device, self.repeats, self.rank = name, device, repeats, rank
        self.sizes = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.small = name == "tiny"
        """Lengths divided by 16, to try the script on a CPU."""
        self.rate: float | None = None

    # ---- what is measured -------------------------------------------------------------------------

    def matmul(self) -> None:
        import torch

        size = 256 if self.small else 8192
        x = torch.randn(size, size, device=self.device, dtype=self.dtype)
        seconds = self._timed(lambda: x @ x, repeats=20)
        self.rate = 2 * size**3 / seconds
        self.say("matmul", tflops=round(self.rate / 1e12, 1), torch=torch.__version__)

    def trie(self, memory: float | None = None, what: str = "hone trie", **body: Any) -> None:
        """Forward and backward of the trie's one row."""
        from hone.learner.trie import pack

        learner = self._learner(memory, **body)
        samples = self._samples(PROMPTS, COMPLETIONS, PROMPT, COMPLETION)
        self._rows(what, learner, pack(samples, row_tokens=2 * self._n(ROW), fill=True), memory)

    def job(self, what: str = "hone job (Learner.train)") -> None:
        """The same trie as a whole job: packing, loss, optimizer."""
        from hone.types import TrainConfig

        learner = self._learner(None)
        groups = self._groups(PROMPTS, COMPLETIONS, PROMPT, COMPLETION)
        config = TrainConfig(row_tokens=2 * self._n(ROW), learning_rate=1e-6)
        metrics: dict[str, float] = {}

        def run() -> None:
            metrics.update(learner.train(groups, config, probe=False).metrics)

        with self._peak() as peak:
            seconds = self._timed(run)
        logical = metrics["learn/logical_tokens"]
        self.say(
            what,
            seconds=seconds,
            logical_tokens_per_s=logical / seconds,
            computed_tokens_per_s=metrics["learn/computed_tokens"] / seconds,
            peak_gb=peak(),
            phases={k: v for k, v in metrics.items() if k.endswith("_s")},
        )

    def deterministic(self) -> None:
        """The job with deterministic algorithms, as the learner's process runs it."""
        import torch

        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self.job("hone job, deterministic")
        finally:
            torch.use_deterministic_algorithms(False)

    def causal(self, memory: float | None = None) -> None:
        """One causal row: one path, of which the last tokens are trained, or all."""
        from hone.learner.trie import pack

        learner = self._learner(memory)
        for trained in (TRAINED, ROW - 1):
            samples = self._samples(1, 1, ROW - trained, trained)
            batch = pack(samples, row_tokens=self._n(ROW), fill=True)
            self._rows(f"hone causal row, {trained} trained", learner, batch, memory)

    def peft(self) -> None:
        """HF + PEFT: padded rows of the trie's calls, and the causal row."""
        import torch

        model = self._peft_model()
        length, row = self._n(PROMPT + COMPLETION), self._n(ROW)
        for what, batch, tokens, trained, sliced in (
            ("trie's calls, 4 x 2,304, full logits", 4, length, self._n(COMPLETION), False),
            ("trie's calls, 4 x 2,304, trained logits", 4, length, self._n(COMPLETION), True),
            ("causal row, full logits", 1, row, row - 1, False),
            ("causal row, 2,048 trained logits", 1, row, self._n(TRAINED), True),
        ):
            ids = torch.randint(5, self.sizes["vocab_size"], (batch, tokens), device=self.device)

            def run(ids: Any = ids, trained: int = trained, sliced: bool = sliced) -> None:
                keep = trained + 1 if sliced else 0
                out = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
                logits = out[:, -trained - 1 : -1].float().flatten(0, 1)
                targets = ids[:, -trained:].flatten()
                torch.nn.functional.cross_entropy(logits, targets).backward()

            try:
                with self._peak() as peak:
                    seconds = self._timed(run)
            except torch.cuda.OutOfMemoryError as error:
                self.say(f"HF + PEFT {what}", error=str(error).splitlines()[0])
                continue
            pairs = batch * tokens * (tokens + 1) // 2
            self._tokens(
                f"HF + PEFT {what}",
                seconds,
                logical=batch * tokens,
                computed=batch * tokens,
                labels=batch * trained,
                pairs=pairs,
                peak=peak(),
            )

    def trl(self) -> None:
        """TRL's GRPOTrainer: its compute_loss on the trie's calls, and backward."""
        import torch
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        from bench.peers.trl_train import grpo_trainer, loss_inputs

        words = Tokenizer(WordLevel({"x": 0, "<end>": 1}, unk_token="x"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        cuda = self.device == "cuda"
        trainer = grpo_trainer(
            self._peft_model(), tokenizer, COMPLETIONS, COMPLETIONS, bf16=cuda, use_cpu=not cuda
        )
        calls, prompt, trained = 4, self._n(PROMPT), self._n(COMPLETION)
        ids = torch.randint(5, self.sizes["vocab_size"], (calls, prompt + trained))
        ids = ids.to(self.device)
        advantages = torch.tensor([1.0, -1.0] * (calls // 2), device=self.device)
        inputs = loss_inputs(ids[:, :prompt], ids[:, prompt:], advantages)

        def run() -> None:
            trainer.compute_loss(trainer.model, inputs).backward()
            trainer.model.zero_grad()

        with self._peak() as peak:
            seconds = self._timed(run)
        self._tokens(
            "TRL GRPOTrainer, the trie's calls, 4 x 2,304",
            seconds,
            logical=ids.numel(),
            computed=ids.numel(),
            labels=calls * trained,
            pairs=calls * (prompt + trained) * (prompt + trained + 1) // 2,
            peak=peak(),
        )

    def sequence(self, rounds: int = 3) -> None:
        """The trie and HF + PEFT in turn, both in memory, and the ratio of their medians."""
        import torch

        from hone.learner.forward import row_logprobs
        from hone.learner.trie import pack

        learner = self._learner(None)
        samples = self._samples(PROMPTS, COMPLETIONS, PROMPT, COMPLETION)
        batch = pack(samples, row_tokens=2 * self._n(ROW), fill=True)
        model = self._peft_model()
        length, trained, calls = self._n(PROMPT + COMPLETION), self._n(COMPLETION), 4
        ids = torch.randint(5, self.sizes["vocab_size"], (calls, length), device=self.device)

        def trie() -> None:
            for row in batch.rows:
                logprobs, _ = row_logprobs(learner.body, row, batch.labels, learner.lora)
                logprobs.sum().backward()
            learner.optimizer.zero_grad()

        def peft() -> None:
            out = model(input_ids=ids, use_cache=False, logits_to_keep=trained + 1).logits
            logits = out[:, -trained - 1 : -1].float().flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, ids[:, -trained:].flatten()).backward()
            model.zero_grad()

        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(batch.logical_tokens / self._timed(trie))
            theirs.append(calls * length / self._timed(peft))
        ratio = sorted(ours)[rounds // 2] / sorted(theirs)[rounds // 2]
        self.say(
            "trie and HF + PEFT in turn, logical tokens/s",
            trie=[round(x) for x in ours],
            peft=[round(x) for x in theirs],
            ratio=ratio,
        )

    def recompiles(self) -> None:
        """Graphs compiled by fifty ragged jobs after a warm-up of every length."""
        import torch
        import torch._dynamo
        from torch._dynamo.utils import counters

        from hone.types import TrainConfig

        learner = self._learner(None)
        config = TrainConfig(row_tokens=self._n(ROW), learning_rate=1e-6, beta=0.01)
        generator = torch.Generator().manual_seed(1)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        started = perf_counter()
        for tokens in (400, 700, 1000, 1500, 2000, 3000, 4000, 6000, 8000):
            learner.train(self._groups(1, 2, tokens - 200, 100), config)
        warm = perf_counter() - started
        graphs = counters["stats"]["unique_graphs"]
        started = perf_counter()
        lengths = []
        for _ in range(50):
            sizes = number(1, 4), number(2, 9), number(100, 3000), number(10, 300)
            result = learner.train(self._groups(*sizes), config)
            lengths.append(int(result.metrics["learn/computed_tokens"]))
        self.say(
            "recompiles of fifty ragged jobs",
            compiled=counters["stats"]["unique_graphs"] - graphs,
            compiled_in_warm_up=graphs,
            warm_up_s=warm,
            jobs_s=perf_counter() - started,
            distinct_lengths=len(set(lengths)),
        )

    def gradients(self) -> None:
        """The adapter's gradient against unshared float32 passes; HF in bfloat16 beside it."""
        import torch
        from transformers import AutoModelForCausalLM

        from hone.learner.forward import row_logprobs
        from hone.learner.trie import pack
        from hone.models.lora import Lora

        learner = self._learner(None)
        body, lora = learner.body, learner.lora
        with torch.no_grad():
            for name, leaf in lora.parameters():
                if ".b" in name:
                    leaf.normal_(0, 0.02)
        samples = self._samples(2, 4, 1024, 128)
        batch = pack(samples, row_tokens=2 * self._n(ROW), fill=True)
        sign = torch.randn(len(batch.labels), generator=torch.Generator().manual_seed(3))
        state = self._model().state_dict()  # the same weights: of the same seed

        def collected() -> Any:
            grads = [leaf.grad.flatten().double() for _, leaf in lora.parameters()]
            for _, leaf in lora.parameters():
                leaf.grad = None
            return torch.cat(grads)

        ours = torch.empty(len(batch.labels))
        for row in batch.rows:
            logprobs, _ = row_logprobs(body, row, batch.labels, lora)
            (logprobs * sign[row.label].to(logprobs)).sum().backward()
            ours[row.label] = logprobs.detach().float().cpu()
        trie = collected()

        def unshared(dtype: Any) -> tuple[Any, Any]:
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self._config(), dtype=dtype)
            model.load_state_dict(state)
            model.requires_grad_(False)
            factors = dict(lora.named())
            for name, module in model.named_modules():
                stem = f"base_model.model.{name}"
                if f"{stem}.lora_A.weight" in factors:
                    _hook(module, factors, stem, lora.scale)
            values, at = [], 0
            for call in (call for sample in samples for call in sample.calls):
                ids = torch.from_numpy(call.ids).to(self.device)
                hidden = model.model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
                places = torch.from_numpy(call.prompt + call.places).to(self.device)
                logits = model.lm_head(hidden[places - 1]).float()
                logprobs = logits.log_softmax(-1).gather(1, ids[places][:, None])[:, 0]
                part = sign[at : at + len(places)].to(logprobs)
                (logprobs * part).sum().backward()
                values.append(logprobs.detach().float().cpu())
                at += len(places)
            return torch.cat(values), collected()

        assert isinstance(lora, Lora)
        expected, reference = unshared(torch.float32)
        theirs, plain = unshared(self.dtype)
        self.say(
            "gradient against an unshared float32 reference",
            trie_relative=float((trie - reference).norm() / reference.norm()),
            plain_hf_relative=float((plain - reference).norm() / reference.norm()),
            trie_cosine=float(torch.nn.functional.cosine_similarity(trie, reference, 0)),
            trie_logprob_mean_error=float((ours - expected).abs().mean()),
            plain_hf_logprob_mean_error=float((theirs - expected).abs().mean()),
            trie_logprob_max_error=float((ours - expected).abs().max()),
        )

    def profile(self) -> None:
        """Where one trie step spends its time, by kernel."""
        import torch
        from torch.profiler import ProfilerActivity

        from hone.learner.forward import row_logprobs
        from hone.learner.trie import pack

        learner = self._learner(None)
        samples = self._samples(PROMPTS, COMPLETIONS, PROMPT, COMPLETION)
        batch = pack(samples, row_tokens=2 * self._n(ROW), fill=True)

        def run() -> None:
            logprobs, _ = row_logprobs(learner.body, batch.rows[0], batch.labels, learner.lora)
            logprobs.sum().backward()

        self._timed(run)
        # With the CPU's activities every kernel would count twice.
        kinds = [ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as profiler:
            run()
            self._wait()
        kernels = sorted(
            (
                (event.self_device_time_total / 1e3, event.count, event.key)
                for event in profiler.key_averages()
                if event.self_device_time_total
            ),
            reverse=True,
        )
        total = sum(ms for ms, _, _ in kernels)
        self.say(
            "profile of the trie",
            kernels_ms=round(total, 1),
            top=[f"{ms:.1f} ms x{count} {key[:90]}" for ms, count, key in kernels[:30]],
        )

    def attention(self) -> None:
        """FlexAttention on the trie's row, forward and backward, with other tiles than torch's default."""
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        from hone.learner import flex
        from hone.learner.trie import pack

        samples = self._samples(PROMPTS, COMPLETIONS, PROMPT, COMPLETION)
        (row,) = pack(samples, row_tokens=2 * self._n(ROW), fill=True).rows
        row = flex.padded(row, -(-len(row) // 512) * 512)
        mask = flex.block_mask(row.leave, row.positions, None, self.device)
        heads = self.sizes["num_attention_heads"]
        size = 1, heads, len(row), self.sizes["hidden_size"] // heads
        on_gpu = self.device == "cuda"  # FlexAttention has no backward pass on a CPU
        q, k, v = (
            torch.randn(size, device=self.device, dtype=self.dtype, requires_grad=on_gpu)
            for _ in range(3)
        )
        for options in TILES if on_gpu else TILES[:1]:

            def call(options: Any = options) -> Any:
                return flex_attention(q, k, v, block_mask=mask, kernel_options=options)

            try:
                compiled = torch.compile(call, dynamic=False)
                forward, backward = self._timed(compiled, repeats=20), None
                if on_gpu:
                    out: Any = compiled()
                    grad = torch.randn_like(out)
                    back = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
                    backward = self._timed(back, repeats=20)
            except Exception as error:  # noqa: BLE001  not every tile fits into a multiprocessor
                self.say("attention", options=options, error=str(error).splitlines()[-1][:200])
                continue
            self.say(
                "attention",
                options=options,
                forward_ms=forward * 1e3,
                backward_ms=None if backward is None else backward * 1e3,
            )

    # ---- how --------------------------------------------------------------------------------------

    def _rows(self, what: str, learner: Any, batch: Any, memory: float | None) -> None:
        from hone.learner.forward import row_logprobs

        body, lora = learner.body, learner.lora

        def run() -> None:
            for row in batch.rows:
                logprobs, _ = row_logprobs(body, row, batch.labels, lora)
                logprobs.sum().backward()
            for _, leaf in lora.parameters():
                leaf.grad = None

        with self._peak() as peak:
            seconds = self._timed(run)
        self._tokens(
            what,
            seconds,
            logical=batch.logical_tokens,
            computed=batch.computed_tokens,
            labels=len(batch.labels),
            pairs=sum(int((row.positions + 1).sum()) for row in batch.rows),
            peak=peak(),
            rows=[len(row) for row in batch.rows],
            recomputed=[str(body.recomputation(body.arranged(row))) for row in batch.rows],
            budget_gb=memory,
        )

    def _tokens(
        self, what: str, seconds: float, *, logical: int, computed: int, labels: int, pairs: int,
        peak: float | None, **more: Any,
    ) -> None:  # fmt: skip
        s = self.sizes
        hidden, inner, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
        width = s["num_attention_heads"] * (hidden // s["num_attention_heads"])
        kv = s["num_key_value_heads"] * (hidden // s["num_attention_heads"])
        per_layer = hidden * (2 * width + 2 * kv + 3 * inner)
        needed = (
            4 * layers * per_layer * computed
            + 4 * hidden * s["vocab_size"] * labels
            + 14 * width * layers * pairs
        )
        self.say(
            what,
            seconds=seconds,
            logical_tokens_per_s=round(logical / seconds),
            computed_tokens_per_s=round(computed / seconds),
            share=None if self.rate is None else round(needed / seconds / self.rate, 4),
            peak_gb=peak,
            labels=labels,
            **more,
        )

    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(self._config(), dtype=self.dtype)

    def _config(self) -> Any:
        from transformers import Qwen2Config

        fields = {"max_position_embeddings": 32768, "attn_implementation": "sdpa"}
        return Qwen2Config(**self.sizes, **fields)

    def _learner(self, memory: float | None, **body: Any) -> Any:
        import torch

        from hone.learner.learner import Learner
        from hone.learner.transformers_body import TransformersBody
        from hone.models.lora import Lora

        self._free()
        most = None if memory is None else int(memory * 1e9)
        model = self._model()
        raw = json.loads(model.config.to_json_string(use_diff=False))
        made = TransformersBody(model, raw=raw, memory=most, **body)
        lora = Lora.init(made.layout, rank=self.rank, alpha=ALPHA, device=self.device)
        torch.manual_seed(1)
        return Learner(made, lora, base_model="bench")

    def _peft_model(self) -> Any:
        from peft import LoraConfig, get_peft_model

        self._free()
        settings = LoraConfig(
            r=self.rank, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return get_peft_model(self._model(), settings)

    def _n(self, tokens: int) -> int:
        return max(2, tokens // 16) if self.small else tokens

    def _ids(self, count: int, seed: int) -> list[int]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        high = self.sizes["vocab_size"]
        return torch.randint(5, high, (count,), generator=generator).tolist()

    def _groups(self, prompts: int, completions: int, prompt: int, completion: int) -> list[Any]:
        from hone.trajectory import Trajectory, TrajectoryGroup
        from hone.types import Call

        groups = []
        for p in range(prompts):
            ids = self._ids(self._n(prompt), 1000 * prompts + p)
            trajectories = []
            for c in range(completions):
                answer = self._ids(self._n(completion), 7919 * (p + 1) + c)
                call = Call(prompt_ids=ids, completion_ids=answer, logprobs=[-12.0] * len(answer))
                trajectories.append(Trajectory(calls=[call], reward=float(c % 2)))
            groups.append(TrajectoryGroup(trajectories=trajectories))
        return groups

    def _samples(self, prompts: int, completions: int, prompt: int, completion: int) -> list[Any]:
        import numpy as np

        from hone.learner.samples import LabelledCall, Sample

        samples = []
        for p in range(prompts):
            ids = self._ids(max(1, self._n(prompt)), p)
            for c in range(completions):
                answer = self._ids(self._n(completion), 7919 * (p + 1) + c)
                call = LabelledCall(
                    ids=np.array(ids + answer),
                    prompt=len(ids),
                    places=np.arange(len(answer)),
                    logprobs=None,
                    exact=True,
                    temperature=1.0,
                    advantage=1.0,
                )
                samples.append(Sample(p, c, (call,)))
        return samples

    def _timed(self, run: Callable[[], Any], *, repeats: int | None = None) -> float:
        """Median seconds after two warm-up runs, the first of which compiles."""
        started = perf_counter()
        run()
        self._wait()
        first = perf_counter() - started
        run()
        seconds = []
        for _ in range(repeats or self.repeats):
            self._wait()
            started = perf_counter()
            run()
            self._wait()
            seconds.append(perf_counter() - started)
        self.first_s = first
        return sorted(seconds)[len(seconds) // 2]

    @contextmanager
    def _peak(self) -> Iterator[Callable[[], float | None]]:
        import torch

        if self.device != "cuda":
            yield lambda: None
            return
        torch.cuda.reset_peak_memory_stats()
        yield lambda: round(torch.cuda.max_memory_allocated() / 1e9, 2)

    def _wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:  # noqa: BLE001  a failed measurement must not end the others
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
        self._free()

    def say(self, what: str, **values: Any) -> None:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        first = getattr(self, "first_s", None)
        line = {"what": what, "shape": self.name, **rounded}
        if first is not None:
            line["first_run_s"] = round(first, 1)
        print(json.dumps(line), flush=True)


def _hook(module: Any, factors: dict[str, Any], stem: str, scale: float) -> None:
    a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]

    def adapted(_: Any, args: Any, out: Any) -> Any:
        x = args[0]
        return out + (x @ a.to(x.dtype).t()) @ b.to(x.dtype).t() * scale

    module.register_forward_hook(adapted)


def learner(options: argparse.Namespace) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in options.shapes.split(","):
        bench = Bench(shape, device, options.repeats, options.rank)
        shallow = Bench(shape, device, options.repeats, options.rank, layers=4)
        measurements: dict[str, Callable[[], None]] = {
            "matmul": bench.matmul,
            "trie": bench.trie,
            "job": bench.job,
            "deterministic": bench.deterministic,
            "trie35": lambda bench=bench: bench.trie(35.0),
            "trie17": lambda bench=bench: bench.trie(17.0),
            "causal": bench.causal,
            "peft": bench.peft,
            "trl": bench.trl,
            "sequence": bench.sequence,
            "profile": bench.profile,
            "attention": bench.attention,
            "gradients": shallow.gradients,
            "recompiles": shallow.recompiles,
        }
        chosen = options.only.split(",") if options.only else list(measurements)
        if unknown := sorted(set(chosen) - set(measurements)):
            raise SystemExit(f"--only: {unknown[0]!r} is none of {', '.join(measurements)}")
        for name in ["matmul", *(name for name in chosen if name != "matmul")]:
            bench._guarded(measurements[name])


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the learner's process
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("what", choices=["learner"])
    parser.add_argument("--only", default="", help="measurements, separated by commas")
    parser.add_argument("--shapes", default="3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=RANK, help="of LoRA")
    learner(parser.parse_args())


if __name__ == "__main__":
    main()
