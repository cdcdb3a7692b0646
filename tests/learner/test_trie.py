"""The trie and its rows: every label sees exactly its own call's tokens, and shares the rest."""

from time import thread_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import Batch, PackedRow, pack


def call(
    prompt: list[int],
    completion: list[int],
    *,
    places: list[int] | None = None,
    logprobs: list[float] | None = None,
    temperature: float = 1.0,
    advantage: float = 1.0,
) -> LabelledCall:
    return LabelledCall(
        ids=np.array(prompt + completion),
        prompt=len(prompt),
        places=np.array(list(range(len(completion))) if places is None else places),
        logprobs=None if logprobs is None else np.array(logprobs),
        exact=True,
        temperature=temperature,
        advantage=advantage,
    )


def alone(*calls: LabelledCall) -> list[Sample]:
    return [Sample(0, i, (c,)) for i, c in enumerate(calls)]


def context(row: PackedRow, node: int) -> list[int]:
    """What a node sees, itself included, by the rule a GPU's block mask uses."""
    return [int(row.token_ids[k]) for k in range(node + 1) if node < row.leave[k]]


def contexts(batch: Batch) -> dict[int, tuple[list[int], int]]:
    """Per label: the ids it is predicted from, and its target."""
    seen: dict[int, tuple[list[int], int]] = {}
    for row in batch.rows:
        for label, query in zip(row.label.tolist(), row.label_query.tolist(), strict=True):
            assert label not in seen, f"label {label} is in two rows"
            ids = context(row, int(row.query_node[query]))
            seen[label] = ids, int(batch.labels.target[label])
    return seen


def expected(samples: list[Sample]) -> list[tuple[list[int], int]]:
    return [
        (c.ids[: c.prompt + p].tolist(), int(c.ids[c.prompt + p]))
        for sample in samples
        for c in sample.calls
        for p in c.places.tolist()
    ]


def test_a_shared_prompt_is_computed_once():
    samples = alone(call([1, 2, 3], [4, 5]), call([1, 2, 3], [6, 7]), call([1, 2, 3], [8]))
    batch = pack(samples, row_tokens=100)
    (row,) = batch.rows
    # last tokens are not computed: nothing is predicted from them
    assert row.token_ids.tolist() == [1, 2, 3, 4, 6]
    assert row.positions.tolist() == [0, 1, 2, 3, 3]
    assert row.leave.tolist() == [5, 5, 5, 4, 5]
    assert [(s.start, s.stop, s.depth, s.ancestors) for s in row.segments] == [
        (0, 3, 0, ()),
        (3, 4, 3, ((0, 3),)),
        (4, 5, 3, ((0, 3),)),
    ]
    # Paths of 4, 4 and 3 tokens.
    assert (batch.logical_tokens, batch.computed_tokens, batch.shared_tokens) == (14, 5, 11 - 5)
    assert sorted(contexts(batch).items()) == list(enumerate(expected(samples)))


def test_identical_completions_keep_two_labels_on_one_edge():
    batch = pack(
        alone(
            call([1, 2], [3], logprobs=[-0.5], advantage=1.0),
            call([1, 2], [3], logprobs=[-0.7], advantage=-1.0),
        ),
        row_tokens=10,
    )
    (row,) = batch.rows
    assert row.token_ids.tolist() == [1, 2]
    assert row.query_node.tolist() == [1]  # one query answers both
    assert row.label.tolist() == [0, 1] and row.label_query.tolist() == [0, 0]
    assert batch.labels.advantage.tolist() == [1.0, -1.0]
    assert batch.labels.sampler_logprob.tolist() == [-0.5, -0.7]


def test_a_quoted_completion_is_context_and_not_labelled_again():
    first, second = call([1], [2, 3]), call([1, 2, 3, 9], [4])
    batch = pack([Sample(0, 0, (first, second))], row_tokens=10)
    (row,) = batch.rows
    assert row.token_ids.tolist() == [1, 2, 3, 9]
    assert len(row.segments) == 1  # the conversation continues exactly: one unbranched path
    assert len(batch.labels) == 3
    assert batch.labels.call.tolist() == [0, 0, 1] and batch.labels.rollout.tolist() == [0, 0, 0]
    assert sorted(contexts(batch).values()) == [([1], 2), ([1, 2], 3), ([1, 2, 3, 9], 4)]


def test_temperatures_of_one_parent_are_separate_queries():
    batch = pack(alone(call([1], [2]), call([1], [2], temperature=0.5)), row_tokens=10)
    (row,) = batch.rows
    assert row.query_node.tolist() == [0, 0]
    assert row.query_temperature.tolist() == [0.5, 1.0]
    assert row.label.tolist() == [1, 0]


def test_nothing_below_the_last_label_is_computed():
    batch = pack(alone(call([1], [2, 3, 4, 5], places=[1])), row_tokens=10)
    assert batch.rows[0].token_ids.tolist() == [1, 2]
    assert contexts(batch) == {0: ([1, 2], 3)}


def test_cut_rows_repeat_only_the_prefix():
    prompt = list(range(10))
    samples = alone(*(call(prompt, [20 + i] * 6) for i in range(4)))
    batch = pack(samples, row_tokens=20)
    # 10 for the prompt and 5 for each completion: two completions a row
    assert [len(row) for row in batch.rows] == [20, 20]
    assert sorted(contexts(batch).items()) == list(enumerate(expected(samples)))


def test_small_subtrees_share_a_row_and_fill_rows_of_large_ones():
    # two prompts of 4 with one call each (3 computed), budget 14: both in one row
    samples = alone(call([1] * 4, [2] * 4), call([3] * 4, [4] * 4))
    assert [len(row) for row in pack(samples, row_tokens=14).rows] == [14]
    # root 4; a large branch (5 + 2 x 5) that must be cut and a small one (1) that fits beside it
    branch = [1, 1, 1, 1, 5, 5, 5, 5, 5]
    samples = alone(
        call(branch, [6] * 6), call(branch, [7] * 6), call([1, 1, 1, 1], [8, 8])
    )  # fmt: skip
    assert [len(row) for row in pack(samples, row_tokens=15).rows] == [15, 14]


def test_a_path_longer_than_the_budget_gets_its_row():
    batch = pack(alone(call([1] * 50, [2]), call([3], [4])), row_tokens=8)
    assert [len(row) for row in batch.rows] == [50, 1]


@st.composite
def conversations(draw: st.DrawFn) -> list[Sample]:
    """Calls that continue, branch off, quote and repeat each other, over four token ids."""
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5)
    paths: list[list[int]] = [draw(tokens)]
    samples: list[Sample] = []
    for i in range(draw(st.integers(1, 6))):
        calls = []
        for _ in range(draw(st.integers(1, 3))):
            base = draw(st.sampled_from(paths))
            prompt = base[: draw(st.integers(1, len(base)))] + draw(st.one_of(st.just([]), tokens))
            completion = draw(tokens)
            places = draw(st.sets(st.integers(0, len(completion) - 1), min_size=1))
            calls.append(
                call(
                    prompt,
                    completion,
                    places=sorted(places),
                    temperature=draw(st.sampled_from([1.0, 0.5])),
                )
            )
            paths.append(prompt + completion)
        samples.append(Sample(0, i, tuple(calls)))
    return samples


@settings(deadline=None, max_examples=150)
@given(conversations(), st.integers(1, 40), st.randoms())
def test_every_label_sees_its_own_call(samples: list[Sample], row_tokens: int, random):
    batch = pack(samples, row_tokens=row_tokens)
    assert sorted(contexts(batch).items()) == list(enumerate(expected(samples)))
    longest = max(int(row.positions.max()) + 1 for row in batch.rows)
    for row in batch.rows:
        assert len(row) <= max(row_tokens, longest)
        pairs = set(zip(row.query_node.tolist(), row.query_temperature.tolist(), strict=True))
        assert len(pairs) == len(row.query_node)
        for label, query in zip(row.label.tolist(), row.label_query.tolist(), strict=True):
            assert row.query_temperature[query] == batch.labels.temperature[label]
        for segment in row.segments:  # both descriptions of who sees whom agree
            above = [int(row.token_ids[k]) for a, b in segment.ancestors for k in range(a, b)]
            own = row.token_ids[segment.start : segment.stop].tolist()
            assert above + own == context(row, segment.stop - 1)
            assert len(above) == segment.depth
    shuffled = list(samples)
    random.shuffle(shuffled)
    again = pack(shuffled, row_tokens=row_tokens)
    assert [r.token_ids.tolist() for r in again.rows] == [r.token_ids.tolist() for r in batch.rows]


def test_a_hundred_thousand_tokens_are_packed_in_well_under_a_second():
    rng = np.random.default_rng(0)
    samples = []
    for g in range(44):
        prompt = rng.integers(0, 50_000, 256).tolist()
        for t in range(8):
            completion = rng.integers(0, 50_000, 32).tolist()
            samples.append(Sample(g, t, (call(prompt, completion),)))
    start = thread_time()
    batch = pack(samples, row_tokens=1024)
    spent = thread_time() - start
    assert batch.logical_tokens == 44 * 8 * 288
    assert batch.computed_tokens == 44 * (256 + 8 * 31)
    assert len(batch.rows) == 22
    assert spent < 1.0, (
        f"{spent:.2f} s"
    )  # of this thread's CPU time: 0.06 s, however busy the machine


def test_nothing_to_share_costs_nothing():
    samples = alone(*(call([10 * i + j for j in range(8)], [3] * 3) for i in range(6)))
    batch = pack(samples, row_tokens=24)
    assert (batch.computed_tokens, batch.shared_tokens) == (6 * 10, 0)
    assert [len(row) for row in batch.rows] == [20, 20, 20]


@pytest.mark.parametrize("row_tokens", [1, 7, 1000])
def test_one_token_prompts(row_tokens: int):
    samples = alone(call([5], [6]), call([7], [8]))
    assert sorted(contexts(pack(samples, row_tokens=row_tokens)).values()) == [([5], 6), ([7], 8)]


def many(groups: int, prompt: int, completion: int, *, shared: int = 0) -> list[Sample]:
    """Groups of eight completions, each on a prompt of its own after `shared` common tokens."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 50_000, shared).tolist()
    samples = []
    for g in range(groups):
        own = system + rng.integers(0, 50_000, prompt - shared).tolist()
        for t in range(8):
            tokens = rng.integers(0, 50_000, completion).tolist()
            samples.append(Sample(g, t, (call(own, tokens),)))
    return samples


def test_a_long_prompt_is_computed_once_where_the_budget_allows():
    samples = many(1, 2048, 256)
    # The prompt once and 255 of every completion, whose last token predicts nothing.
    assert [len(row) for row in pack(samples, row_tokens=5000).rows] == [2048 + 8 * 255]
    # 2048 + 4 x 255 = 3068 tokens fit into 3100: twice the prompt instead of eight times.
    assert [len(row) for row in pack(samples, row_tokens=3100).rows] == [3068, 3068]


def test_rows_grow_with_what_they_share_and_not_with_the_budget():
    # 256 + 8 x 31 = 504 tokens a group, nothing shared between them: two to a row of 1,024.
    alike = many(8, 256, 32)
    assert [len(row) for row in pack(alike, row_tokens=100_000).rows] == [1008] * 4
    # A system prompt of 16 tokens is not worth a row of 4,000: it is repeated.
    rows = pack(many(8, 256, 32, shared=16), row_tokens=100_000).rows
    assert [len(row) for row in rows] == [16 + 2 * (504 - 16)] * 4
    # One of 500 is: eight times that is more than the 2,548 tokens that all groups have.
    (row,) = pack(many(8, 504, 32, shared=500), row_tokens=100_000).rows
    assert len(row) == 500 + 8 * (4 + 8 * 31)
