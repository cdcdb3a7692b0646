"""The embedded engine: the conformance suite, and what only this engine promises."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conformance.engine import (
    PROMPT,
    EngineConformance,
    Served,
    assert_agree,
    spelling_tokenizer,
)
from tests.prose import Prose
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from hone.errors import ConfigError, EngineError, RequestTooLarge
from hone.inference.base import AdapterRef, Completion, Sampling, complete
from hone.inference.embedded.adapter_merge import has_memory_for_copy
from hone.inference.embedded.engine import EmbeddedEngine
from hone.inference.grammar import Grammars
from hone.models.decoder import Decoder
from hone.models.lora import Lora


def spell(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def write_adapter(directory: Path, decoder: Decoder, *, step: int) -> AdapterRef:
    """A random adapter, large enough to change every answer."""
    lora = Lora.init(decoder.config, rank=4, seed=step)
    generator = torch.Generator().manual_seed(step)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=generator)
    lora.save(directory, base_model="tiny")
    return AdapterRef("m", step, lora.sha256)


async def serve(
    tiny: Path,
    tmp_path: Path,
    *,
    device: str = "cpu",
    decode: Callable[[list[int]], str] = spell,
    **settings: int,
) -> Served:
    decoder = Decoder.load(tiny, device=device)
    grammars = Grammars(spelling_tokenizer, decoder.config.vocab)
    engine = EmbeddedEngine(decoder, decode=decode, grammars=grammars, **settings)
    adapters = {}
    for step in (1, 2):
        ref = write_adapter(tmp_path / str(step), decoder, step=step)
        adapters[ref] = tmp_path / str(step)
        await engine.publish(ref, adapters[ref])
    return Served(engine, tiny, adapters)


class TestEmbedded(EngineConformance):
    @pytest.fixture
    async def served(self, tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Served]:
        served = await serve(tiny_llama_dir, tmp_path)
        yield served
        await served.engine.close()


@pytest.mark.e2e  # the suite of TestEmbedded again, which takes seconds
class TestTightEmbedded(TestEmbedded):
    """The same with prompts prefilled in chunks of 7 tokens and a very small KV cache."""

    @pytest.fixture
    async def served(self, tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Served]:
        # 512 bytes a token: room for one request of 4 long samples, or a few small ones.
        served = await serve(tiny_llama_dir, tmp_path, prefill_tokens=7, kv_budget_bytes=512 * 2700)
        yield served
        await served.engine.close()


@pytest.mark.e2e
class TestMergedEmbedded(TestEmbedded):
    """The same with every adapter merged into the weights as soon as it has computed a row."""

    @pytest.fixture
    async def served(self, tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Served]:
        served = await serve(tiny_llama_dir, tmp_path, merge_after=1)
        await complete(served.engine, PROMPT, Sampling(max_tokens=40), served.first)
        yield served
        await served.engine.close()


@pytest.mark.gpu
class TestEmbeddedOnCuda(EngineConformance):
    @pytest.fixture
    async def served(self, tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Served]:
        served = await serve(tiny_llama_dir, tmp_path, device="cuda")
        yield served
        await served.engine.close()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill memory that nobody has written yet with NaN, as it may be by chance in real use."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
async def served(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Served]:
    served = await serve(tiny_llama_dir, tmp_path)
    yield served
    await served.engine.close()


async def test_the_samples_of_a_prompt_share_one_prefill(served):
    await complete(served.engine, PROMPT, Sampling(n=8, max_tokens=4), served.first)
    assert served.engine.stats().prefilled_tokens == len(PROMPT)


async def test_requests_with_the_same_prompt_share_one_prefill(served):
    one = Sampling(max_tokens=4)
    await asyncio.gather(*(complete(served.engine, PROMPT, one) for _ in range(8)))
    stats = served.engine.stats()
    assert stats.prefilled_tokens == len(PROMPT) and stats.prompt_tokens == 8 * len(PROMPT)


def rows_of(answers: list[Completion]) -> int:
    """Tokens that must be read to sample these: every different beginning that goes on, once."""
    longest = max(len(done.ids) for done in answers)
    beginnings = [{tuple(d.ids[:t]) for d in answers if len(d.ids) > t} for t in range(1, longest)]
    return sum(len(different) for different in beginnings)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
async def test_equal_samples_are_computed_once_until_they_diverge(served, temperature):
    way = Sampling(n=8, max_tokens=40, temperature=temperature, seed=5)
    answers = await complete(served.engine, PROMPT, way, served.first)
    for done in answers:
        assert_agree(done.logprobs, served.expected(PROMPT, done, served.first, temperature or 1.0))
    stats = served.engine.stats()
    assert stats.decoded_tokens == rows_of(answers)
    assert stats.sampled_tokens == 8 * 40
    different = len({tuple(done.ids) for done in answers})
    assert different == 1 if temperature == 0 else different > 1


async def test_requests_with_one_prompt_share_rows_whatever_their_sampling(served):
    greedy = Sampling(max_tokens=12, temperature=0.0)
    cool = Sampling(n=3, max_tokens=12, temperature=0.3, seed=1)
    narrow = Sampling(n=2, max_tokens=7, top_k=4, seed=2)
    ways = [greedy, cool, narrow]
    alone = [await complete(served.engine, PROMPT, way) for way in ways]
    before = served.engine.stats().decoded_tokens
    await served.engine.sleep()  # so that they come together
    together = asyncio.gather(*(complete(served.engine, PROMPT, way) for way in ways))
    await asyncio.sleep(0.02)
    await served.engine.wake()
    answers = await together
    assert [[d.ids for d in some] for some in answers] == [[d.ids for d in some] for some in alone]
    (one, two, three) = answers
    for done, temperature in [*((d, 1.0) for d in one + three), *((d, 0.3) for d in two)]:
        assert_agree(done.logprobs, served.expected(PROMPT, done, None, temperature))
    shared = served.engine.stats().decoded_tokens - before
    assert shared == rows_of([*one, *two, *three]) < sum(map(rows_of, answers))


async def test_a_sample_that_leaves_a_shared_row_does_not_affect_the_others(served):
    greedy = Sampling(max_tokens=30, temperature=0.0)
    (whole,) = await complete(served.engine, PROMPT, greedy, served.first)
    await served.engine.sleep()
    early = served.engine.generate(PROMPT, greedy, served.first)
    first = asyncio.ensure_future(anext(early))
    rest = asyncio.ensure_future(complete(served.engine, PROMPT, greedy, served.first))
    short = replace(greedy, max_tokens=9)
    ends = asyncio.ensure_future(complete(served.engine, PROMPT, short, served.first))
    await asyncio.sleep(0.02)
    await served.engine.wake()
    await first
    await early.aclose()  # the one who came first is aborted
    assert (await ends)[0].ids == whole.ids[:9]
    assert (await rest)[0].ids == whole.ids
    assert served.engine.stats().running == 0


async def test_prompts_that_begin_alike_and_come_together_read_their_beginning_once(served):
    front = [*PROMPT, *PROMPT[::-1], *PROMPT]  # 60 tokens
    prompts = [[*front, 300 + i, *PROMPT[:i]] for i in range(6)]
    one = Sampling(max_tokens=8, seed=1)
    await served.engine.sleep()  # so that they do come together
    answers = asyncio.gather(*(complete(served.engine, p, one, served.first) for p in prompts))
    await asyncio.sleep(0.02)
    await served.engine.wake()
    for prompt, (done,) in zip(prompts, await answers, strict=True):
        assert_agree(done.logprobs, served.expected(prompt, done, served.first))
    # 60 in common; then 1, 2, 3, 4, 5 and 6 tokens of their own
    assert served.engine.stats().prefilled_tokens == 60 + 21


@pytest.mark.parametrize("tokens", [7, 512])
async def test_aborting_the_request_that_others_wait_for_does_not_affect_them(
    tiny_llama_dir, tmp_path, tokens
):
    served = await serve(tiny_llama_dir, tmp_path, prefill_tokens=tokens)
    prompts = [[*PROMPT * 4, 300 + i] for i in range(5)]
    one = Sampling(max_tokens=8, seed=1)
    tasks = [asyncio.create_task(complete(served.engine, p, one)) for p in prompts]
    for _ in range(3):
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    tasks[1].cancel()
    for prompt, task in zip(prompts[2:], tasks[2:], strict=True):
        (done,) = await task
        assert_agree(done.logprobs, served.expected(prompt, done, None))
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert (served.engine.stats().running, served.engine.stats().waiting) == (0, 0)
    await served.engine.close()


async def test_a_probe_neither_reads_nor_fills_the_cache(served):
    await complete(served.engine, PROMPT, Sampling(max_tokens=4), served.first)
    before = served.engine.stats()
    await served.engine.probe([[*PROMPT, 7, 8], [*PROMPT * 2, 3]], served.first)
    assert served.engine.stats() == before


async def test_a_sleeping_engine_is_probed(served):
    awake = await served.engine.probe([PROMPT], served.first)
    await served.engine.sleep()
    assert await served.engine.probe([PROMPT], served.first) == awake
    await served.engine.wake()


@pytest.mark.parametrize(
    "sequences",
    [
        [[1, 2], []],
        [[1] * 513],
        [[1, 512]],
        [[-1]],
    ],
)
async def test_probes_that_cannot_be_read_are_refused(prose: Prose, served, sequences):
    with pytest.raises(ConfigError) as caught:
        await served.engine.probe(sequences)
    prose(caught)
    whole = await served.engine.probe([[1] * 512])
    assert len(whole.logprobs[0]) == 511


async def test_an_abandoned_probe_does_not_disturb_the_engine(tiny_llama_dir, tmp_path):
    served = await serve(tiny_llama_dir, tmp_path, prefill_tokens=1)
    calls = [served.engine.probe([PROMPT * 20] * 3, ref) for ref in (None, served.first)]
    tasks = [asyncio.create_task(call) for call in (*calls, served.engine.unload(served.second))]
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await served.engine.probe([PROMPT], served.first)).sha256 == served.first.sha256
    (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=4, seed=0))
    assert len(done.ids) == 4
    await served.engine.close()


async def test_a_probe_of_an_engine_that_closes_ends_with_an_error(
    prose: Prose, tiny_llama_dir, tmp_path
):
    served = await serve(tiny_llama_dir, tmp_path, prefill_tokens=1)
    probe = asyncio.create_task(served.engine.probe([PROMPT * 20, PROMPT[1:] * 20]))
    await asyncio.sleep(0.02)
    await served.engine.close()
    with pytest.raises(EngineError) as caught:
        await probe
    prose(caught)


async def test_the_next_turn_computes_only_new_tokens(served):
    once = Sampling(max_tokens=30, seed=0)
    (cut,) = await complete(served.engine, PROMPT, once, served.first)
    end = next(t for i, t in enumerate(cut.ids) if i >= 20 and t not in cut.ids[:i])
    (done,) = await complete(served.engine, PROMPT, replace(once, stop_ids=(end,)), served.first)
    assert done.finish == "stop" and len(done.ids) > 20
    before = served.engine.stats().prefilled_tokens
    await complete(served.engine, [*PROMPT, *done.ids, 4, 5], Sampling(max_tokens=2), served.first)
    # The last sampled token was never fed, so it is read now, with the two that follow it.
    assert served.engine.stats().prefilled_tokens - before == 3


async def test_an_answer_cut_at_its_limit_is_not_kept(served):
    (cut,) = await complete(served.engine, PROMPT, Sampling(max_tokens=30, seed=0), served.first)
    before = served.engine.stats().prefilled_tokens
    await complete(served.engine, [*PROMPT, *cut.ids, 4, 5], Sampling(max_tokens=2), served.first)
    # All of the prompt is still there, as the block it was; 30 + 2 tokens follow it.
    assert served.engine.stats().prefilled_tokens - before == 30 + 2


async def test_a_prefix_is_not_shared_between_adapters(served):
    await complete(served.engine, PROMPT, Sampling(max_tokens=2), served.first)
    (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=9), served.second)
    assert served.engine.stats().prefilled_tokens == 2 * len(PROMPT)
    assert_agree(done.logprobs, served.expected(PROMPT, done, served.second))


async def test_a_request_for_a_cached_sequence_is_answered(served):
    (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=20, seed=0))
    sequence = [*PROMPT, *done.ids[:-1]]
    (more,) = await complete(served.engine, sequence, Sampling(max_tokens=3, seed=1))
    assert_agree(more.logprobs, served.expected(sequence, more, None))


async def test_requests_beyond_the_budget_wait_and_are_all_answered(tiny_llama_dir, tmp_path):
    served = await serve(tiny_llama_dir, tmp_path, kv_budget_bytes=512 * 600)
    wants = [Sampling(n=4, max_tokens=32, seed=i) for i in range(12)]  # each reserves 128 + 20
    answers = asyncio.gather(*(complete(served.engine, PROMPT[i:], s) for i, s in enumerate(wants)))
    most = 0
    while not answers.done():
        stats = served.engine.stats()
        reserved, cached, budget = (
            stats.kv_reserved_bytes,
            stats.kv_cached_bytes,
            stats.kv_budget_bytes,
        )
        assert reserved is not None and cached is not None and budget is not None
        most = max(most, reserved)
        assert reserved + cached <= budget
        await asyncio.sleep(0.001)
    assert all(len(d.ids) == 32 for samples in await answers for d in samples)
    assert 512 * 256 <= most <= 512 * 600
    assert served.engine.stats().kv_reserved_bytes == 0
    await served.engine.close()


async def test_what_can_never_fit_is_refused_with_the_numbers(
    prose: Prose, tiny_llama_dir, tmp_path
):
    served = await serve(tiny_llama_dir, tmp_path, kv_budget_bytes=512 * 100)
    with pytest.raises(RequestTooLarge) as caught:
        await complete(served.engine, PROMPT, Sampling(max_tokens=400))
    prose(caught)
    (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=5))
    assert len(done.ids) == 5
    await served.engine.close()


async def test_samples_grow_through_the_slot_pools_exactly(served):
    (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=300, seed=4), served.first)
    assert len(done.ids) == 300
    assert_agree(done.logprobs, served.expected(PROMPT, done, served.first))


async def test_memory_that_was_never_written_is_never_read(served, poisoned):
    early = served.engine.generate(PROMPT, Sampling(max_tokens=20, seed=1), served.first)
    first, late = Completion(), []
    async for delta in early:
        first.add(delta)
        if len(first.ids) == 9:
            sampling = Sampling(max_tokens=5, seed=2)
            request = complete(served.engine, PROMPT, sampling, served.first)
            late.append(asyncio.ensure_future(request))
        await asyncio.sleep(0.002)
    (second,) = await late[0]
    assert_agree(first.logprobs, served.expected(PROMPT, first, served.first))
    assert_agree(second.logprobs, served.expected(PROMPT, second, served.first))


async def test_the_answer_ends_with_the_context(served):
    (done,) = await complete(served.engine, [9] * 500, Sampling(max_tokens=100, seed=4))
    assert (len(done.ids), done.finish) == (12, "length")


async def test_a_failing_step_fails_its_requests_and_says_why(
    prose: Prose, tiny_llama_dir, tmp_path
):
    def broken(ids: list[int]) -> str:
        raise RuntimeError("no text today")

    served = await serve(tiny_llama_dir, tmp_path, decode=broken)
    with pytest.raises(EngineError) as caught:
        await complete(served.engine, PROMPT, Sampling(max_tokens=4, stop=("x",)))
    prose(caught)
    with pytest.raises(EngineError) as caught:
        await complete(served.engine, PROMPT, Sampling(max_tokens=4))
    prose(caught)


async def test_open_loads_and_serves_a_model_by_name(tiny_llama_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    letters = {chr(33 + i): i for i in range(512)}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="!"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    engine = EmbeddedEngine.open("./model", device="cpu", kv_budget_bytes=1 << 20)
    (done,) = await complete(engine, PROMPT, Sampling(max_tokens=3, seed=0))
    assert len(done.ids) == 3
    await engine.close()


async def test_windows_hide_the_distant_past_from_samples_too(tmp_path):
    config = MistralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=7,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    served = await serve(tmp_path / "model", tmp_path, prefill_tokens=9)
    prompts = [PROMPT, PROMPT[3:], PROMPT[:5]]
    answers = await asyncio.gather(
        *(complete(served.engine, p, Sampling(n=3, max_tokens=25, seed=1)) for p in prompts)
    )
    for prompt, samples in zip(prompts, answers, strict=True):
        for done in samples:
            assert_agree(done.logprobs, served.expected(prompt, done, None))
    await served.engine.close()


async def test_stats_never_see_an_adapter_half_unloaded(tiny_llama_dir, tmp_path, monkeypatch):
    served = await serve(tiny_llama_dir, tmp_path)
    engine, held = served.engine, []
    assert isinstance(engine, EmbeddedEngine)
    await complete(engine, PROMPT, Sampling(max_tokens=2), served.first)
    prefixes = engine._scheduler.prefixes
    forget = prefixes.forget

    def watched(key: str) -> None:
        """Whether another thread could call `stats` now."""
        other = threading.Thread(target=lambda: held.append(not engine._wakeup.acquire(False)))
        other.start()
        other.join()
        forget(key)

    monkeypatch.setattr(prefixes, "forget", watched)
    await engine.unload(served.first)
    assert held == [True]
    assert served.first.sha256 not in engine.stats().adapters
    assert engine.stats().kv_cached_bytes == 0
    await engine.close()


async def test_the_memory_of_the_card_it_runs_on_is_asked_for(tiny_llama_dir, monkeypatch):
    class OnTheSecond(Decoder):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 1)

    requests: list[str] = []

    def mem_get_info(device: str) -> tuple[int, int]:
        requests.append(device)
        return 1 << 30, 1 << 31

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    cpu = Decoder.load(tiny_llama_dir)
    parts = {"embedding": cpu.embedding, "head": cpu.head, "norm": cpu.norm, "layers": cpu.layers}
    decoder = OnTheSecond(cpu.config, **parts)
    engine = EmbeddedEngine(decoder)
    assert engine.stats().kv_budget_bytes == 1 << 28
    assert has_memory_for_copy(decoder)
    assert requests == ["cuda:1", "cuda:1"]
    await engine.close()
