"""Which tokens a publisher compares with the engine's."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from hone.learner.body import DecoderBody
from hone.learner.probe import OTHERS, ProbeCalls
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import PackedRow
from hone.models.decoder import Decoder
from hone.models.lora import Lora

F32, BF16 = torch.float32, torch.bfloat16


def call(prompt: range, completion: range, advantage: float = 1.0) -> LabelledCall:
    """Every token of the completion is trained."""
    ids = [*prompt, *completion]
    return LabelledCall(
        ids=np.array(ids),
        prompt=len(prompt),
        places=np.arange(len(completion)),
        logprobs=None,
        exact=False,
        temperature=0.7,
        advantage=advantage,
    )


def chosen(dtype: torch.dtype, *calls: LabelledCall) -> ProbeCalls:
    return ProbeCalls.choose([Sample(0, i, (c,)) for i, c in enumerate(calls)], dtype)


def trained(probe: ProbeCalls) -> list[int]:
    """The ids of the tokens that are watched because the job trains them."""
    ids = [int(c.ids[c.prompt + p]) for c in probe.calls for p in c.places]
    return [i for i, own in zip(ids, probe.trained.tolist(), strict=True) if own]


def others(probe: ProbeCalls) -> list[int]:
    ids = [int(c.ids[c.prompt + p]) for c in probe.calls for p in c.places]
    return [i for i, own in zip(ids, probe.trained.tolist(), strict=True) if not own]


def test_in_float32_a_window_around_the_first_trained_token_is_enough():
    probe = chosen(F32, call(range(100), range(200, 300)))
    (window,) = probe.calls
    assert window.ids.tolist() == [*range(76, 100), *range(200, 224)]
    assert window.temperature == 1.0  # whatever it was sampled at
    assert trained(probe) == [*range(200, 224)]
    assert others(probe) == [*range(77, 100)]  # all but the first, which nothing stands before


def test_in_bfloat16_whole_calls_are_scored():
    probe = chosen(BF16, call(range(100), range(200, 300)))
    assert probe.calls[0].ids.tolist() == [*range(100), *range(200, 300)]
    assert trained(probe) == [*range(200, 300)]
    # 32 of the 99 places 1..99, evenly: every 98 / 31 = 3.16th
    assert others(probe)[:4] == [1, 4, 7, 10] and len(others(probe)) == OTHERS
    assert others(probe)[-1] == 99


def test_at_most_384_tokens_of_a_call_are_scored():
    (window,) = chosen(BF16, call(range(3000), range(5000, 6000))).calls
    assert window.ids.tolist() == [*range(3000 - 256, 3000), *range(5000, 5128)]
    (window,) = chosen(BF16, call(range(3000), range(5000, 5010))).calls
    assert window.ids.tolist() == [*range(3000 - 374, 3000), *range(5000, 5010)]
    (window,) = chosen(BF16, call(range(10), range(5000, 6000))).calls
    assert window.ids.tolist() == [*range(10), *range(5000, 5128)]


def test_rows_of_the_probe_are_as_long_as_rows_of_the_job_where_they_can_be(tiny_llama_dir: Path):
    class Noted(DecoderBody):
        likes: ClassVar[list[tuple[int, int]]] = []

        def arranged(self, row: PackedRow, like: int = 0) -> PackedRow:
            self.likes.append((len(row), like))
            return row

    body = Noted(Decoder.load(tiny_llama_dir))
    lora = Lora.init(body.layout, rank=2)
    probe = chosen(
        F32, call(range(100), range(200, 300))
    )  # 24 and 24 tokens, the last of them only scored
    for lengths in ((40, 60, 900), (40,), ()):
        probe.logprobs(body, lora, lengths)
    assert body.likes == [(47, 60), (47, 0), (47, 0)]


def test_a_shared_prefix_counts_once_and_is_scored_once():
    same = [call(range(100), range(start, start + 40)) for start in (200, 300, 400, 500)]
    probe = chosen(F32, *same)
    # 24 + 24, then 24 more for each: the fourth would be the 120th token, over 96
    assert [c.ids[24] for c in probe.calls] == [200, 300, 400]
    assert len(trained(probe)) == 72
    assert others(probe) == [*range(77, 100)]  # of the first call; the others begin alike
    assert [c.ids[100] for c in chosen(BF16, *same[:3]).calls] == [200, 300, 400]


def test_an_engine_without_a_prefix_cache_scores_at_most_512_tokens():
    """vLLM computes every sequence of a probe whole."""
    same = [call(range(100), range(start, start + 40)) for start in (200, 300, 400, 500)]
    assert [len(c.ids) for c in chosen(BF16, *same).calls] == [140] * 3  # 140 + 40 + 40 + 40 <= 320
    long = [call(range(300), range(start, start + 5)) for start in (400, 500, 600, 700)]
    assert [len(c.ids) for c in chosen(BF16, *long).calls] == [305]


def test_equal_calls_are_scored_once():
    probe = chosen(F32, *[call(range(10), range(200, 208))] * 3, call(range(10), range(200, 210)))
    assert [len(c.ids) for c in probe.calls] == [18, 20]
    assert trained(probe) == [*range(200, 208), 208, 209]  # of the second only what is new


def test_calls_with_the_largest_advantages_come_first_and_one_is_always_used():
    long, short = call(range(250), range(250, 350), -3.0), call(range(4), range(4, 8), 2.0)
    idle = call(range(4), range(8, 12), 0.0)
    assert [len(c.ids) for c in chosen(BF16, short, idle, long).calls] == [350]
    assert [len(c.ids) for c in chosen(F32, short, idle, long).calls] == [48, 8]
    nothing = chosen(F32, idle)
    assert nothing.calls == () and nothing.trained.tolist() == []


def test_movement_names_places_of_the_windows():
    probe = chosen(F32, call(range(100), range(200, 202)), call(range(100), range(300, 302)))
    # Labels in order: 23 others and 200, 201; then 300, 301.
    before = torch.zeros(27, dtype=torch.float64)
    after = before.clone()
    after[24], after[26], after[25] = 0.5, -0.75, 0.25
    movement = probe.movement(before, after)
    assert [(t.sequence, t.place, t.after) for t in movement.tokens] == [
        (0, 24, 0.0),
        (0, 25, 0.5),
        (1, 24, 0.25),
        (1, 25, -0.75),
    ]
    assert [movement.sequences[t.sequence][t.place] for t in movement.tokens] == [
        200,
        201,
        300,
        301,
    ]
    assert [t.place for t in movement.others] == [*range(1, 24)]
