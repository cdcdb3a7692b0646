"""ART's options of a training call as keys of TrainConfig: honoured, refused or without effect."""

import logging
from typing import Any

import pytest
from tests.prose import Prose
from tests.sdk.conftest import serving
from tests.sdk.standin import StandIn

from hone import RemoteBackend, TrainableModel, options
from hone.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ({"loss_fn": "cispo"}, {"loss": "cispo"}),
        ({"loss_fn": "ppo", "epsilon": 0.1}, {"loss": "grpo", "epsilon": 0.1}),
        ({"ppo": False}, {"loss": "cispo"}),
        ({"normalize_advantages": False}, {"scale_rewards": False}),
        ({"normalize_advantages": True}, {}),
        ({"normalize_advantages": True, "scale_rewards": False}, {"scale_rewards": False}),
        ({"truncated_importance_sampling": 3.0}, {"importance_cap": 3.0}),
        ({"truncated_importance_sampling": None}, {"importance_cap": None}),
        ({"packed_sequence_length": 4096}, {"row_tokens": 4096}),
        ({"precalculate_logprobs": True, "logprob_calculation_chunk_size": 512}, {}),
        ({"adam_params": None, "epsilon": None, "kl_penalty_coef": 0.1}, {"kl_penalty_coef": 0.1}),
    ],
)
def test_options_of_a_training_call(written: dict[str, Any], keys: dict[str, Any]):
    assert options.train_keys(written) == keys


@pytest.mark.parametrize(
    "written",
    [
        {"adam_params": {"lr": 1}},
        {"advantage_balance": 0.5},
        {"allow_training_without_logprobs": True},
        {"kl_ref_adapter_path": "x"},
        {"importance_sampling_level": "sequence"},
        {"loss_fn": "dro"},
        {"loss_fn": "cispo", "ppo": True},
        {"loss_fn": "ppo", "loss": "dapo"},
        {"normalize_advantages": False, "scale_rewards": True},
    ],
)
async def test_options_that_hone_refuses(prose: Prose, written: dict[str, Any]):
    model, standin = TrainableModel(name="a", base_model="b"), StandIn()
    async with serving(standin.app) as url:
        await model.register(RemoteBackend(url))
        sent = len(standin.requests)
        with pytest.raises(ConfigError) as caught:
            await model.train([], _config=written)
        assert len(standin.requests) == sent
    prose(caught)


def test_options_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture):
    options._log_no_effect.cache_clear()
    with caplog.at_level(logging.INFO, logger="hone"):
        for _ in range(2):
            options.train_keys(
                {"precalculate_logprobs": True, "logprob_calculation_chunk_size": 512}
            )
        options.train_keys({"precalculate_logprobs": False, "logprob_calculation_chunk_size": 1024})
    assert sorted(record.message.partition(":")[0] for record in caplog.records) == [
        "train(logprob_calculation_chunk_size) has no effect",
        "train(precalculate_logprobs) has no effect",
    ]
