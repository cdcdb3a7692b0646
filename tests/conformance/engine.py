"""What every engine must do, as one suite: subclass EngineConformance and say how to start yours.

In:   a `Served` engine over a tiny model, with two adapters published
Out:  failures that name the promise broken

The reference is a plain forward pass of transformers (with PEFT for adapters), computed here in
float32 and not by hone: an engine that agrees only with itself would pass anything. How closely an
engine must agree depends on the number type it computes in: `Tolerance`.

Two clauses are for engines that can hold them, and a subclass says so: `own_sampler` (the same draws
give the same tokens in any batch) and `knows_both` (the log-probability before top-p, top-k and min-p
is known beside the one after them).
"""

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.patience import PATIENCE_S
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hone.errors import ConfigError, EngineError, GrammarError, HoneError
from hone.inference.base import AdapterRef, Completion, Constraint, Engine, Sampling, complete

PROMPT = [5, 17, 301, 44, 9, 120, 77, 3, 250, 66, 41, 12, 90, 33, 208, 7, 19, 480, 2, 111]
"""Twenty tokens: more than one chunk of the prefix cache."""


END = 2


def spelled(start: str) -> Constraint:
    """A grammar over the text of spelling_tokenizer(), which cannot encode parts of "<id>".

    Without the option llguidance encodes text that must come, and allows only the tokens it gets.
    """
    return Constraint("grammar", f'%llguidance {{"no_forcing": true}}\nstart: {start}\n')


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose text is "<id>" per token; token 2 ends an answer."""
    backend = Tokenizer(WordLevel({f"<{i}>": i for i in range(512)}, unk_token="<0>"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"<{END}>")


@dataclass(frozen=True)
class Tolerance:
    """How far log-probabilities may lie from those of a float32 forward pass."""

    mean: float
    most: float
    exact: bool
    """Whether the order of tokens by probability is that of the reference."""


FLOAT32 = Tolerance(mean=2e-5, most=1e-3, exact=True)
BFLOAT16 = Tolerance(mean=0.05, most=0.3, exact=False)


@dataclass(frozen=True)
class Served:
    """An engine and what it was told to serve."""

    engine: Engine
    model: Path
    adapters: dict[AdapterRef, Path]
    tolerance: Tolerance = FLOAT32

    def assert_agree(self, ours: Sequence[float], theirs: Sequence[float]) -> None:
        assert_agree(ours, theirs, self.tolerance)

    @property
    def first(self) -> AdapterRef:
        return next(iter(self.adapters))

    @property
    def second(self) -> AdapterRef:
        return list(self.adapters)[1]

    def reference(self, ids: list[int], adapter: AdapterRef | None) -> torch.Tensor:
        """Log-probabilities [len(ids), vocab] of the token after each place."""
        return self.logits(ids, adapter).log_softmax(-1)

    def logits(self, ids: list[int], adapter: AdapterRef | None = None) -> torch.Tensor:
        model = _plain_model(self.model, None if adapter is None else self.adapters[adapter])
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float()

    def expected(
        self,
        prompt: list[int],
        done: Completion,
        adapter: AdapterRef | None,
        temperature: float = 1,
    ) -> list[float]:
        """What the plain forward pass says of a completion's tokens."""
        rows = self.reference(prompt + done.ids, adapter)[len(prompt) - 1 : -1]
        rows = (rows / temperature).log_softmax(-1)
        return rows.gather(1, torch.tensor(done.ids)[:, None])[:, 0].tolist()


@functools.lru_cache(maxsize=4)
def _plain_model(directory: Path, adapter: Path | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, adapter)


def assert_agree(
    ours: Sequence[float], theirs: Sequence[float], tolerance: Tolerance = FLOAT32
) -> None:
    gaps = np.abs(np.array(ours) - np.array(theirs))
    assert gaps.mean() <= tolerance.mean, (gaps.mean(), gaps.max())
    assert gaps.max() <= tolerance.most, (gaps.mean(), gaps.max())


class EngineConformance:
    """The suite. A subclass provides the fixture `served`."""

    own_sampler = True
    """Equal draws give equal tokens, whatever else is in the batch."""
    knows_both = True
    """Narrowed draws have the log-probability before the narrowing beside the one after it."""

    def replays(self, served: Served) -> bool:
        """Whether a request that is sent again gets the same tokens.

        Otherwise not: the second time the prompt is in the prefix cache, and coarse arithmetic then
        gives other last bits.
        """
        return self.own_sampler or served.tolerance.exact

    @pytest.fixture
    def served(self) -> Served:
        raise NotImplementedError("a subclass starts its engine here")

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    async def test_logprobs_are_those_of_a_plain_forward_pass(self, served, temperature):
        sampling = Sampling(n=3, max_tokens=24, temperature=temperature, seed=1)
        for adapter in (None, served.first):
            for done in await complete(served.engine, PROMPT, sampling, adapter):
                assert len(done.ids) == len(done.logprobs) == 24
                served.assert_agree(
                    done.logprobs, served.expected(PROMPT, done, adapter, temperature)
                )

    async def test_greedy_takes_the_most_likely_token(self, served):
        done, *others = await complete(
            served.engine, PROMPT, Sampling(n=3, max_tokens=12, temperature=0), served.first
        )
        assert [other.ids for other in others] == [done.ids] * 2
        rows = served.reference(PROMPT + done.ids, served.first)[len(PROMPT) - 1 : -1]
        if served.tolerance.exact:
            assert done.ids == rows.argmax(-1).tolist()
        served.assert_agree(done.logprobs, rows.max(-1).values.tolist())

    async def test_draws_follow_the_distribution(self, served):
        many = Sampling(n=64, max_tokens=1, temperature=0.7)
        seen: Counter[int] = Counter()
        for seed in range(40):
            request = Sampling(**{**_fields(many), "seed": seed})
            seen.update(done.ids[0] for done in await complete(served.engine, PROMPT, request))
        total = sum(seen.values())
        p = (served.reference(PROMPT, None)[-1] / 0.7).softmax(-1)
        # Pearson's statistic over tokens expected at least 8 times, the rest pooled; for k cells
        # its mean is k - 1 and its deviation sqrt(2 (k - 1)): five deviations never happen.
        cells = [i for i in range(len(p)) if p[i] * total >= 8]
        observed = [seen[i] for i in cells] + [total - sum(seen[i] for i in cells)]
        wanted = [float(p[i]) * total for i in cells]
        wanted.append(total - sum(wanted))
        statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
        k = len(cells)
        assert k > 5 and statistic < k + 5 * (2 * k) ** 0.5, (statistic, k)

    async def test_same_seed_and_same_batch_give_equal_tokens(self, served):
        sampling = Sampling(n=4, max_tokens=20, seed=7)
        once = await complete(served.engine, PROMPT, sampling, served.first)
        again = await complete(served.engine, PROMPT, sampling, served.first)
        assert not self.replays(served) or [d.ids for d in once] == [d.ids for d in again]
        assert len({tuple(d.ids) for d in once}) == 4, "the samples of one request must differ"

    async def test_another_batch_gives_the_same_tokens(self, served):
        wants = [(PROMPT[: 8 + i % 9], Sampling(max_tokens=12, seed=i)) for i in range(64)]
        alone = [(await complete(served.engine, p, s, served.first))[0] for p, s in wants]
        crowd = await asyncio.gather(
            *(complete(served.engine, p, s, served.first) for p, s in wants)
        )
        flips = 0
        for (prompt, _), one, (other,) in zip(wants, alone, crowd, strict=True):
            expected = served.expected(prompt, one, served.first)
            served.assert_agree(one.logprobs, expected)
            if other.ids != one.ids:
                flips += 1
                expected = served.expected(prompt, other, served.first)
            served.assert_agree(other.logprobs, expected)
        assert not flips or not self.own_sampler

    async def test_prompts_of_any_length_that_come_and_go_are_read_exactly(self, served):
        async def ask(i: int) -> tuple[list[int], list[Completion]]:
            length = 3 + i if i % 2 else 100 + 3 * i
            prompt = [(7 * i + 13 * j) % 500 + 3 for j in range(length)]
            for _ in range(i % 5):
                await asyncio.sleep(0.01)  # so they come and go at different steps
            sampling = Sampling(n=1 + i % 3 // 2, max_tokens=4 + (i * 11) % 30, seed=i)
            return prompt, await complete(served.engine, prompt, sampling, served.first)

        for prompt, answers in await asyncio.gather(*(ask(i) for i in range(24))):
            for done in answers:
                served.assert_agree(done.logprobs, served.expected(prompt, done, served.first))

    async def test_stop_ids_end_the_answer_and_carry_their_logprob(self, served):
        ends = tuple(range(0, 512, 8))
        free = Sampling(max_tokens=64, seed=3)
        (done,) = await complete(served.engine, PROMPT, replace(free, stop_ids=ends))
        assert done.ids[-1] in ends and not {*done.ids[:-1]} & {*ends}
        assert (done.finish, done.stop) == ("stop", done.ids[-1])
        served.assert_agree(done.logprobs, served.expected(PROMPT, done, None))
        (whole,) = await complete(served.engine, PROMPT, free)
        assert not self.replays(served) or done.ids == whole.ids[: len(done.ids)]

    async def test_stop_strings_end_the_answer_across_tokens(self, served):
        # The tiny model's text is "<id>" per token, so these strings span two of them.
        free, stops = Sampling(max_tokens=64, seed=3), ("nowhere", "5><", "7><")
        (done,) = await complete(served.engine, PROMPT, replace(free, stop=stops))
        texts = ["".join(f"<{i}>" for i in ids) for ids in (done.ids[:-1], done.ids)]
        assert done.finish == "stop" and done.stop in stops[1:]
        assert done.stop in texts[1] and not any(stop in texts[0] for stop in stops)
        (whole,) = await complete(served.engine, PROMPT, free)
        assert not self.replays(served) or done.ids == whole.ids[: len(done.ids)]

    async def test_length_ends_the_answer(self, served):
        (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=3, seed=0))
        assert (len(done.ids), done.finish) == (3, "length")

    async def test_deltas_arrive_as_they_are_drawn(self, served):
        sampling = Sampling(n=2, max_tokens=6, seed=5)
        deltas = [d async for d in served.engine.generate(PROMPT, sampling)]
        # A server beside this process may send two tokens of a sample at once, but not all.
        assert len(deltas) >= (12 if self.own_sampler else 4)
        assert [d.finish for d in deltas].count("length") == 2
        streamed = [Completion(), Completion()]
        for delta in deltas:
            streamed[delta.sample].add(delta)
        for done in streamed:
            served.assert_agree(done.logprobs, served.expected(PROMPT, done, None))
        whole = await complete(served.engine, PROMPT, sampling)
        assert not self.replays(served) or [d.ids for d in streamed] == [d.ids for d in whole]

    @pytest.mark.parametrize(
        ("way", "allowed_ids"),
        [
            ({"top_k": 3}, lambda p: set(p.argsort(descending=True)[:3].tolist())),
            ({"min_p": 0.3}, lambda p: set((p >= 0.3 * p.max()).nonzero()[:, 0].tolist())),
            ({"top_p": 0.5}, lambda p: _nucleus(p, 0.5)),
        ],
    )
    async def test_narrowed_draws_stay_inside_and_say_both_logprobs(self, served, way, allowed_ids):
        p = served.reference(PROMPT, None)[-1].exp()
        allowed = allowed_ids(p)
        done = await complete(served.engine, PROMPT, Sampling(n=32, max_tokens=1, seed=0, **way))
        mass, lowest = float(p[list(allowed)].sum()), float(p[list(allowed)].min().log())
        for sample in done:
            plain = float(p[sample.ids[0]].log())
            near = 1e-4 if served.tolerance.exact else served.tolerance.most
            inside = sample.ids[0] in allowed
            assert inside if served.tolerance.exact else plain > lowest - 2 * near
            assert sample.masked_logprobs == pytest.approx([plain - np.log(mass)], abs=near)
            assert sample.exact == self.knows_both
            known = [plain] if self.knows_both else sample.masked_logprobs
            assert sample.logprobs == pytest.approx(known, abs=near)
        if len(allowed) > 1:
            assert len({d.ids[0] for d in done}) > 1

    async def test_a_constraint_leaves_the_models_distribution_over_what_it_allows(self, served):
        p = served.reference(PROMPT, None)[-1].exp()
        # The text of a token is "<id>", so these are the tokens 10 to 19.
        sampling = Sampling(n=32, max_tokens=1, seed=0, constraint=spelled("/(<1[0-9]>){3}/"))
        mass, near = float(p[10:20].sum()), 1e-4 if served.tolerance.exact else 0.1
        done = await complete(served.engine, PROMPT, sampling)
        for sample in done:
            assert 10 <= sample.ids[0] < 20 and not sample.forced
            plain = float(p[sample.ids[0]].log())
            assert sample.masked_logprobs == pytest.approx([plain - np.log(mass)], abs=near)
            assert sample.exact == self.knows_both
            known = [plain] if self.knows_both else sample.masked_logprobs
            assert sample.logprobs == pytest.approx(known, abs=near)
        assert len({sample.ids[0] for sample in done}) > 1

    async def test_a_constrained_answer_ends_and_says_what_was_forced(self, served):
        constraint = spelled('"<30>" two "<50>"\ntwo: "<40>" | "<41>"')
        sampling = Sampling(n=16, max_tokens=9, seed=0, constraint=constraint)
        done = await complete(served.engine, PROMPT, sampling)
        # Only the second token is a choice; the last is the end, which nothing else could follow.
        assert {tuple(one.ids) for one in done} == {(30, 40, 50, END), (30, 41, 50, END)}
        for one in done:
            assert (one.finish, one.forced) == ("stop", [0, 2, 3])
            assert one.masked_logprobs is not None
            assert [one.masked_logprobs[place] for place in one.forced] == pytest.approx([0, 0, 0])
            if self.knows_both:
                served.assert_agree(one.logprobs, served.expected(PROMPT, one, None))

    async def test_streams_and_cut_answers_follow_the_constraint(self, served):
        sampling = Sampling(n=2, max_tokens=3, seed=0, constraint=spelled("/(<30><31>)+/"))
        done = [Completion(), Completion()]
        async for delta in served.engine.generate(PROMPT, sampling, served.first):
            done[delta.sample].add(delta)
        assert {(*one.ids, one.finish) for one in done} <= {
            (30, 31, 30, "length"),
            (30, 31, END, "stop"),
        }

    async def test_a_constraint_that_excludes_nothing_changes_nothing(self, served):
        free = Sampling(n=4, max_tokens=12, seed=3, stop_ids=(END,))
        same = replace(free, constraint=Constraint("regex", "(?s:.*)"))
        plain = await complete(served.engine, PROMPT, free)
        done = await complete(served.engine, PROMPT, same)
        assert not self.own_sampler or [d.ids for d in done] == [d.ids for d in plain]
        if self.knows_both:
            assert all(one.masked_logprobs is None and not one.forced for one in done)

    async def test_greedy_takes_the_most_likely_token_that_is_allowed(self, served):
        sampling = Sampling(max_tokens=1, temperature=0, constraint=spelled("/<1[0-9]>/"))
        (done,) = await complete(served.engine, PROMPT, sampling)
        row = served.reference(PROMPT, None)[-1]
        assert not served.tolerance.exact or done.ids == [10 + int(row[10:20].argmax())]

    async def test_a_constraint_that_does_not_compile_is_refused(self, served):
        wrong = Sampling(constraint=Constraint("regex", "<1("))
        with pytest.raises(GrammarError, match="unclosed group"):
            await served.engine.check(wrong)
        with pytest.raises(GrammarError, match="unclosed group"):
            await complete(served.engine, PROMPT, wrong)
        await served.engine.check(Sampling(constraint=Constraint("regex", "<1>")))

    @pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
    async def test_penalties_and_bias_change_the_draw_and_not_the_logprob(
        self, served, temperature
    ):
        sampling = Sampling(
            max_tokens=12,
            temperature=temperature,
            seed=5,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.3,
            logit_bias=((7, 6.0), (300, 5.0), (9, -100.0)),
        )
        (done,) = await complete(served.engine, PROMPT, sampling)
        rows = served.logits(PROMPT + done.ids)[len(PROMPT) - 1 : -1]
        assert done.masked_logprobs is not None
        for place, token in enumerate(done.ids):
            row = rows[place].clone()
            for biased, bias in sampling.logit_bias:
                row[biased] += bias
            for seen in {*PROMPT, *done.ids[:place]}:
                row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
            for seen, count in Counter(done.ids[:place]).items():
                row[seen] -= 0.7 + 0.4 * count
            if not temperature and served.tolerance.exact:
                assert token == int(row.argmax())
            expected = (row / (temperature or 1)).log_softmax(-1)[token]
            near = 1e-3 if served.tolerance.exact else served.tolerance.most
            assert done.masked_logprobs[place] == pytest.approx(float(expected), abs=near)
        assert 9 not in done.ids
        assert done.exact == self.knows_both
        if self.knows_both:
            wanted = served.expected(PROMPT, done, None, temperature or 1)
            served.assert_agree(done.logprobs, wanted)

    async def test_an_answer_has_at_least_min_tokens_and_says_what_was_excluded(self, served):
        ends = tuple(range(0, served.logits(PROMPT).shape[-1], 2))  # half of all ids
        sampling = Sampling(n=4, max_tokens=12, min_tokens=5, seed=3, stop_ids=ends)
        for done in await complete(served.engine, PROMPT, sampling):
            first, rest = done.ids[:5], done.ids[5:]
            assert not {*first} & {*ends} and len(first) == 5
            assert not {*rest[:-1]} & {*ends}
            rows = served.logits(PROMPT + done.ids)[len(PROMPT) - 1 : -1]
            assert done.masked_logprobs is not None
            for place, token in enumerate(first):
                row = rows[place].clone()
                row[list(ends)] = -math.inf
                near = 1e-3 if served.tolerance.exact else served.tolerance.most
                expected = float(row.log_softmax(-1)[token])
                assert done.masked_logprobs[place] == pytest.approx(expected, abs=near)
            assert done.exact == self.knows_both
            if self.knows_both:
                assert all(one is None for one in done.masked_logprobs[5:])
                served.assert_agree(done.logprobs, served.expected(PROMPT, done, None))

    async def test_unnarrowed_draws_have_no_masked_logprob(self, served):
        # Greedy draws exclude nothing: all log-probabilities are those of temperature 1.
        greedy = Sampling(max_tokens=2, temperature=0, top_p=0.5, top_k=2, min_p=0.2)
        for sampling in (Sampling(max_tokens=2, seed=0), greedy):
            (done,) = await complete(served.engine, PROMPT, sampling)
            assert done.masked_logprobs is None and done.exact
            served.assert_agree(done.logprobs, served.expected(PROMPT, done, None))

    async def test_top_logprobs_are_the_best_of_each_place(self, served):
        (done,) = await complete(
            served.engine, PROMPT, Sampling(max_tokens=4, seed=0, top_logprobs=3)
        )
        rows = served.reference(PROMPT + done.ids, None)[len(PROMPT) - 1 : -1]
        for row, top in zip(rows, done.top, strict=True):
            values, ids = row.topk(3)
            if served.tolerance.exact:
                assert [i for i, _ in top] == ids.tolist()
            near = 1e-4 if served.tolerance.exact else served.tolerance.most
            assert [v for _, v in top] == pytest.approx(values.tolist(), abs=near)

    async def test_adapters_of_one_batch_do_not_mix(self, served):
        refs = [None, served.first, served.second] * 4
        sampling = Sampling(n=2, max_tokens=16, seed=11)
        answers = await asyncio.gather(
            *(complete(served.engine, PROMPT, sampling, ref) for ref in refs)
        )
        for ref, samples in zip(refs, answers, strict=True):
            for done in samples:
                served.assert_agree(done.logprobs, served.expected(PROMPT, done, ref))

    async def test_a_new_adapter_changes_the_answer(self, served):
        greedy = Sampling(max_tokens=24, temperature=0)
        answers = [
            (await complete(served.engine, PROMPT, greedy, ref))[0].ids
            for ref in (None, served.first, served.second)
        ]
        assert len({tuple(a) for a in answers}) == 3

    async def test_a_request_in_flight_is_answered_by_one_step(self, served, tmp_path):
        sampling = Sampling(max_tokens=60, seed=2)
        other, where = served.second, served.adapters[served.second]
        await served.engine.unload(other)  # so that publishing it below is news to the engine
        done, newer = Completion(), []
        async for delta in served.engine.generate(PROMPT, sampling, served.first):
            done.add(delta)
            if len(done.ids) == 5:
                await served.engine.publish(other, where)
                newer = await complete(served.engine, PROMPT, Sampling(max_tokens=5), other)
        served.assert_agree(done.logprobs, served.expected(PROMPT, done, served.first))
        served.assert_agree(newer[0].logprobs, served.expected(PROMPT, newer[0], other))

    async def test_a_continued_conversation_is_read_exactly(self, served):
        prompt = list(PROMPT)
        for turn in range(4):
            sampling = Sampling(n=2, max_tokens=18, seed=turn)
            samples = await complete(served.engine, prompt, sampling, served.first)
            for done in samples:
                served.assert_agree(done.logprobs, served.expected(prompt, done, served.first))
            prompt = prompt + samples[turn % 2].ids + [4, 200 + turn, 6]

    async def test_probe_reads_back_what_is_served(self, served):
        sequence = [*PROMPT, 8, 9, 10]
        for ref in (served.first, served.second):
            probe = await served.engine.probe([sequence, PROMPT], ref)
            assert probe.sha256 == ref.sha256
            rows = served.reference(sequence, ref)[:-1]
            wanted = rows.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()
            served.assert_agree(list(probe.logprobs[0]), wanted)
            assert len(probe.logprobs[1]) == len(PROMPT) - 1

    async def test_probes_of_sequences_that_begin_alike_are_exact(self, served):
        # 40 tokens in common; one ends within them, one is asked for twice, one is a single token.
        front = PROMPT * 2
        sequences = [[*front, *end] for end in ([8, 9, 10], [8, 77], [5] * 12, [8, 9, 10])]
        sequences += [front[:35], [*front[:17], 3, 4], [9]]
        refs = (None, served.first, served.second)
        probes = await asyncio.gather(*(served.engine.probe(sequences, ref) for ref in refs))
        for ref, probe in zip(refs, probes, strict=True):
            assert [len(row) for row in probe.logprobs] == [len(ids) - 1 for ids in sequences]
            for ids, row in zip(sequences[:-1], probe.logprobs, strict=False):
                rows = served.reference(ids, ref)[:-1]
                wanted = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
                served.assert_agree(list(row), wanted)

    async def test_a_probe_as_long_as_the_context_may_lack_its_last_token(self, served):
        length = served.engine.max_length
        sequence = (PROMPT * length)[:length]
        (row,) = (await served.engine.probe([sequence], served.first)).logprobs
        assert len(row) in (length - 1, length - 2)
        wanted = served.reference(sequence, served.first)[:-1]
        wanted = wanted.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()
        served.assert_agree(list(row), wanted[: len(row)])

    async def test_a_probe_changes_nothing_for_samples_that_run(self, served):
        sampling = Sampling(n=2, max_tokens=40, seed=3)
        alone = await complete(served.engine, PROMPT, sampling, served.first)
        running = asyncio.ensure_future(complete(served.engine, PROMPT, sampling, served.first))
        for _ in range(3):
            probe = await served.engine.probe([PROMPT, PROMPT * 3], served.second)
            assert probe.sha256 == served.second.sha256
        for one, done in zip(alone, await running, strict=True):
            assert one.ids == done.ids or not self.own_sampler
            served.assert_agree(done.logprobs, served.expected(PROMPT, done, served.first))

    async def test_publish_refuses_weights_with_another_hash(self, served):
        lie = AdapterRef("m", 9, "0" * 64)
        with pytest.raises(EngineError, match="Nothing was changed"):
            await served.engine.publish(lie, served.adapters[served.first])
        with pytest.raises(EngineError, match="is not served"):
            await complete(served.engine, PROMPT, Sampling(max_tokens=1), lie)

    async def test_unloaded_adapters_are_not_served(self, served):
        await served.engine.unload(served.second)
        with pytest.raises(EngineError, match="is not served"):
            await complete(served.engine, PROMPT, Sampling(max_tokens=1), served.second)
        await complete(served.engine, PROMPT, Sampling(max_tokens=1), served.first)

    async def test_a_client_that_leaves_frees_its_place(self, served):
        stream = served.engine.generate(PROMPT, Sampling(n=4, max_tokens=400), served.first)
        async for _ in stream:
            break
        await stream.aclose()
        (done,) = await complete(served.engine, PROMPT, Sampling(max_tokens=4))
        assert len(done.ids) == 4
        stats = served.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    async def test_requests_wait_while_the_engine_sleeps(self, served):
        await served.engine.sleep()
        waiting = asyncio.ensure_future(complete(served.engine, PROMPT, Sampling(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await served.engine.wake()
        (done,) = await asyncio.wait_for(waiting, PATIENCE_S)
        assert len(done.ids) == 3

    async def test_closing_ends_what_runs_with_an_error(self, served):
        running = asyncio.ensure_future(complete(served.engine, PROMPT, Sampling(max_tokens=450)))
        await asyncio.sleep(0.05)
        await served.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await complete(served.engine, PROMPT, Sampling(max_tokens=1))

    @pytest.mark.parametrize(
        ("prompt", "way", "says"),
        [
            ([], {}, "prompt_ids is empty"),
            ([1, 600], {}, "600, outside the vocabulary"),
            ([1], {"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3"),
            ([1], {"min_tokens": 1, "stop": ("x",)}, "min_tokens: not together with stop strings"),
            ([1] * 512, {}, "the prompt has 512 tokens; the model reads 512"),
            ([1], {"n": 0}, "n is 0"),
            ([1], {"temperature": -1}, "temperature is -1"),
            ([1], {"top_p": 0}, "top_p is 0"),
            ([1], {"stop": ("",)}, "empty string"),
        ],
    )
    async def test_bad_requests_say_what_is_wrong(self, served, prompt, way, says):
        with pytest.raises(HoneError, match=says):
            await complete(served.engine, prompt, Sampling(**way))
        assert issubclass(ConfigError, HoneError)


def _fields(sampling: Sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


def _nucleus(p: torch.Tensor, mass: float) -> set[int]:
    nucleus, total = set(), 0.0
    for i in p.argsort(descending=True).tolist():
        nucleus.add(i)
        total += float(p[i])
        if total >= mass:
            return nucleus
    return nucleus
