"""models/card.py: how a GPU is divided, by hand, for the shapes and GPUs that people have."""

import re

import pytest
from tests.docs.pages import ROOT, blocks
from tests.prose import Prose

from hone.errors import ModelTooLarge
from hone.models.card import ASLEEP, CONTEXT, OVERHEAD, Needs, memory_advice, needs_of, plan_card
from hone.models.known import KNOWN

GB = 10**9
NAMES = {
    "135M": "smollm2-135m-instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
}


def needs(size: str, max_length: int = 8192) -> Needs:
    config = KNOWN[NAMES[size]].config
    return needs_of(config, dtype_bytes=2, rank=8, max_length=max_length)


def test_what_a_model_needs_by_hand():
    # Qwen2.5-3B: 3,085,938,688 parameters in 2 bytes; KV 2 x 36 layers x 2 heads x 128 in 2 bytes.
    model = needs("3B")
    assert (model.weights, model.kv_token) == (6_171_877_376, 36_864)
    # LoRA of rank 8 in 28 + 2 bytes per weight: width per layer (2048 + 2048) + 2 x (256 + 2048) +
    # (2048 + 2048) + 3 x (11008 + 2048) = 51,968; x 36 x 8 x 30 = 449,003,520.
    assert model.learner_fixed == 6_171_877_376 + 449_003_520
    # A row of 8,192 without recomputation: 36 layers x 62,054 bytes a token, and the logits.
    assert model.learner == model.learner_fixed + 8192 * 36 * 62_054 + 33 * 2**26
    assert model.kv(32) == 32 * 8192 * 36_864
    # On two GPUs each has half of vLLM's weights and of its cache, the learner all of its own.
    half = needs_of(KNOWN[NAMES["3B"]].config, dtype_bytes=2, rank=8, max_length=8192, gpus=2)
    assert (half.weights, half.kv_token) == (model.weights // 2, model.kv_token // 2)
    assert half.learner == model.learner


@pytest.mark.parametrize(
    ("total", "size", "sleeps", "kv", "learner", "idle"),
    [
        # 2% spare. 3B at full speed: 27.1 and 1 of context; vLLM 6.2 and 4. Of 141: 138.2 - 10.2 -
        # 28.1 = 99.9, which is more than 256 sequences (77.3); the learner gets the rest, 50.7.
        (141, "3B", False, 77.3, 50.7, 50.7),
        # 7B: 15.2 + 4, learner 42.7 + 1: 138.2 - 19.2 - 43.7 = 75.2, more than 32 sequences (15.0).
        (141, "7B", False, 75.2, 43.7, 43.7),
        # 135M: 256 sequences of 8,192 x 23,040 bytes are 48.3.
        (141, "135M", False, 48.3, 85.6, 85.6),
        # 78.4 - 10.2 - 28.1 = 40.1, more than 32 sequences of 3B (9.7).
        (80, "3B", False, 40.1, 28.1, 28.1),
        # 78.4 - 19.2 - 43.7 = 15.4, still more than 15.0.
        (80, "7B", False, 15.4, 43.7, 43.7),
        # 62.7 - 19.2 - 43.7 is less than 15.0: vLLM sleeps. While it samples the learner's 16.8
        # may stay: 62.7 - 19.2 - 16.8 = 26.7. While it sleeps it keeps 4 of 62.7.
        (64, "7B", True, 26.7, 58.7, 16.8),
        (80, "135M", False, 48.3, 25.8, 25.8),
        # 23.5 - 10.2 - 7.6 = 5.7 is less than 9.7: the learner's weights go; 23.5 - 10.2 - 1 = 12.3.
        (24, "3B", True, 12.3, 19.5, 1.0),
        # 23.5 - 19.2 - 1 = 3.3: seven sequences of 8,192 tokens.
        (24, "7B", True, 3.3, 19.5, 1.0),
        # 23.5 - 4.3 - 6.4 = 12.9, more than 32 sequences (6.0).
        (24, "135M", False, 12.87, 6.38, 6.38),
    ],
)
def test_a_gpu_is_divided(
    total: int, size: str, sleeps: bool, kv: float, learner: float, idle: float
):
    plan = plan_card(total * GB, needs(size))
    assert plan.sleeps is sleeps and plan.offloads is (idle == 1.0)
    got = [plan.kv / GB, plan.learner / GB, plan.learner_idle / GB]
    assert got == pytest.approx([kv, learner, idle], abs=0.06)
    vllm = plan.utilization * plan.total
    assert vllm == pytest.approx(plan.weights + OVERHEAD + plan.kv)
    assert vllm + plan.learner_idle + plan.spare == pytest.approx(plan.total)
    assert plan.spare >= 0.0199 * plan.total
    while_training = plan.learner + (ASLEEP if plan.sleeps else vllm)
    assert while_training <= 0.981 * plan.total


@pytest.mark.parametrize("size", NAMES)
@pytest.mark.parametrize("total", [24, 80, 141])
def test_the_users_share_holds_while_vllm_samples(total: int, size: str):
    plan = plan_card(total * GB, needs(size), utilization=0.9)
    assert plan.utilization == pytest.approx(0.9) and plan.sleeps
    # A tenth is left for the learner; what does not fit into it leaves the GPU.
    fits = needs(size).learner_fixed + CONTEXT <= 0.1 * total * GB
    assert plan.offloads is not fits
    assert plan.learner == pytest.approx(0.98 * total * GB - ASLEEP)


def test_a_server_that_goes_on_serving_has_a_standing_split():
    # 65 GB, 7B: at least one sequence of 8,192 tokens (0.47) and what is left of 0.8.
    plan = plan_card(65 * GB, needs("7B"), sleep=False)
    assert not plan.sleeps and plan.kv / GB == pytest.approx(0.75, abs=0.06)
    explicit = plan_card(80 * GB, needs("7B"), sleep=False, utilization=0.5)
    assert not explicit.sleeps and explicit.learner == pytest.approx(0.48 * 80 * GB)
    assert plan_card(141 * GB, needs("3B"), sleep=True).sleeps


def test_the_users_kv_cache_is_that_of_the_plan(prose: Prose):
    # 78.4 - 19.2 - 43.7 leave 15.4 beside the learner: 8 stay beside it, and the learner gets the rest.
    plan = plan_card(80 * GB, needs("7B"), kv=8 * GB)
    assert not plan.sleeps and plan.kv == 8 * GB
    assert plan.learner / GB == pytest.approx(78.4 - 19.2 - 8, abs=0.06)
    assert plan.utilization == pytest.approx((15.2 + 4 + 8) / 80, abs=0.001)
    # 20 do not: vLLM sleeps, and the learner's 16.8 stay while it samples. With 50 they go.
    for kv, idle in ((20, 16.8), (50, 1.0)):
        plan = plan_card(80 * GB, needs("7B"), kv=kv * GB)
        assert plan.sleeps and plan.kv == kv * GB
        assert plan.learner_idle / GB == pytest.approx(idle, abs=0.06)
    explicit = plan_card(80 * GB, needs("7B"), kv=2 * GB, utilization=0.5)
    assert explicit.sleeps and explicit.kv == 2 * GB
    with pytest.raises(ModelTooLarge) as refused:
        plan_card(80 * GB, needs("7B"), kv=62 * GB)
    prose(refused)


def test_the_plan_in_one_line():
    assert plan_card(64 * GB, needs("7B")).describe() == (
        "64.0 GB of GPU memory; sampling: vLLM 0.72 (weights 15.2, KV cache 26.7, other 4.0), learner "
        "16.8, spare 1.3; training: vLLM asleep, learner 58.7"
    )


def test_the_guide_prints_the_plans_of_its_examples():
    plans = "".join(f"{plan_card(total * GB, needs('7B')).describe()}\n" for total in (80, 48))
    assert plans in [block.code for block in blocks(ROOT / "docs/guides/vllm.md")]


def test_what_does_not_fit_says_what_would(prose: Prose):
    # 12 x 0.98 - 1 = 10.8 is less than 15.2 + 4.
    with pytest.raises(ModelTooLarge) as refused:
        plan_card(12 * GB, needs("7B"))
    prose(refused)
    # More GPUs for vLLM help only if the learner, 16.8 with its context, fits on one of them. Beside
    # a vLLM that goes on: 31.4 - 16.8 is less than 19.2 and more than 7.6 + 4.
    with pytest.raises(ModelTooLarge) as refused:
        plan_card(32 * GB, needs("7B"), sleep=False)
    prose(refused)
    # One sequence of 131,072 tokens is 7.5 of the 3.3 that 24 leave; half of it 3.8, a quarter 1.9.
    with pytest.raises(ModelTooLarge) as refused:
        plan_card(24 * GB, needs("7B", 131072))
    prose(refused)
    # 10% of 24 do not hold the learner beside a vLLM that goes on.
    with pytest.raises(ModelTooLarge) as caught:
        plan_card(24 * GB, needs("3B"), utilization=0.9, sleep=False)
    prose(caught)


def assert_fits(total: int, model: Needs, share: float, sleep: bool | None = None) -> None:
    """Beside the learner, vLLM's share holds a sequence of full length."""
    plan_card(total, model, utilization=share, sleep=sleep)
    assert model.weights + OVERHEAD + model.kv(1) <= share * total


def test_the_advice_has_values_that_fit():
    for size, total in (("3B", 24), ("7B", 24), ("7B", 80), ("135M", 8)):
        model = needs(size)
        text = memory_advice(total * GB, model, utilization=0.9, generations=8, tensor_parallel=2)
        share = re.search(r"reduce gpu_memory_utilization to ([\d.]+);", text)
        length = re.search(r"reduce max_seq_length to (\d+);", text)
        assert share is not None and length is not None, text
        assert float(share[1]) <= 0.82 and int(length[1]) == 4096
        advised = needs(size, int(length[1]))
        assert_fits(total * GB, advised, float(share[1]))
        assert "reduce num_generations to 4;" in text
        assert "increase tensor_parallel_size to 4," in text
    # 7B on 24, half the length: (15.23 + 4 + 0.23) / 24 = 0.8111, so 0.82 and not 0.81.
    for current, change in (
        (0.9, "reduce gpu_memory_utilization to 0.82;"),
        (0.82, "keep gpu_memory_utilization at 0.82;"),
        (0.81, "increase gpu_memory_utilization to 0.82;"),
        (
            None,
            "reduce gpu_memory_utilization to 0.83;",
        ),  # a tenth below the plan, (23.52 - 1) / 24
    ):
        assert change in memory_advice(24 * GB, needs("7B"), utilization=current)
    # Sequences that are short already can still be halved.
    text = memory_advice(24 * GB, needs("3B", 300), utilization=0.95)
    assert "reduce max_seq_length to 150;" in text and "gpu_memory_utilization to 0." in text


@pytest.mark.parametrize(
    ("generations", "says"),
    [
        (8, "reduce num_generations to 4;"),
        (3, "reduce num_generations to 2;"),
        # A group needs two for a comparison.
        (2, "keep num_generations at 2;"),
        (1, "keep num_generations at 1;"),
        (None, "halve num_generations;"),
    ],
)
@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_advice_never_names_more_generations(
    generations: int | None, says: str, *, has_vllm: bool
):
    text = memory_advice(80 * GB, needs("7B"), generations=generations, has_vllm=has_vllm)
    assert says in text and text.count("num_generations") == 1


@pytest.mark.parametrize(("size", "total", "utilization"), [("3B", 24, 0.9), ("7B", 48, 0.95)])
def test_the_advice_fits_a_server_that_goes_on_serving(size: str, total: int, utilization: float):
    """vLLM does not sleep: its share must leave room for the learner."""
    with pytest.raises(ModelTooLarge) as refused:
        plan_card(total * GB, needs(size, 32768), utilization=utilization, sleep=False)
    share = re.search(r"reduce gpu_memory_utilization to ([\d.]+);", str(refused.value))
    length = re.search(r"reduce max_seq_length to (\d+);", str(refused.value))
    assert share is not None and length is not None, refused.value
    advised = needs(size, int(length[1]))
    assert_fits(total * GB, advised, float(share[1]), sleep=False)


def test_a_share_that_is_too_small_is_to_be_increased():
    # 0.2 of 48 is 9.6, less than the weights (15.2): (15.2 + 4 + 4096 tokens, 0.2) / 48 = 0.41.
    text = memory_advice(48 * GB, needs("7B"), utilization=0.2)
    assert "increase gpu_memory_utilization to 0.41;" in text
