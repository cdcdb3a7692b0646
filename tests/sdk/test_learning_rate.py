"""The table of learning rates in docs/reference/config.md is what every client gets."""

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.sdk.conftest import Serve
from tests.sdk.standin import StandIn

from hone import TrainConfig, TrainSFTConfig, art
from hone.art import ArtBackend
from hone.backends.remote import chosen_keys
from hone.finetune.adapter_config import ScheduledTrainConfig
from hone.server.train.art_requests import ART_DEFAULTS
from hone.server.train.model_args import normalize_spec, train_config

PAGE = Path(__file__).parents[2] / "docs/reference/config.md"


def table() -> dict[str, float]:
    """client -> the default in the last column."""
    section = PAGE.read_text(encoding="utf-8").partition("### The learning rate of a job\n")[2]
    rows = re.findall(r"^\| (.+?) \|.*\| `([0-9.e-]+)` \|$", section, re.MULTILINE)
    return {client: float(default) for client, default in rows}


@dataclass
class ArtPackageModel:
    """The fields of `art.TrainableModel` that ArtBackend reads."""

    name: str = "agent"
    project: str = "p"
    base_model: str = "b"
    _internal_config: dict[str, Any] | None = None


@dataclass
class ArtPackageConfig:
    """What pydantic's `art.TrainConfig` answers: the fields that its user set."""

    written: dict[str, Any] = field(default_factory=dict)

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]:
        assert exclude_unset
        return self.written


async def sent_by_art_package(
    serve: Serve, written: dict[str, Any], internal: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The config of the job that a training call through ART's package submits."""
    standin = StandIn()
    backend = ArtBackend(await serve(standin.app))
    model = ArtPackageModel(_internal_config=internal)

    async def train() -> None:
        async for _ in backend._train_model(model, [], ArtPackageConfig(written), {}):
            pass

    task = asyncio.create_task(train())
    await asyncio.wait_for(standin.submitted.wait(), PATIENCE_S)
    standin.emit("done", step=1, metrics={}, reason=None)
    await task
    await backend.close()
    return standin.job.request.config


def of_wing(config: art.TrainConfig | None, **fields: Any) -> TrainConfig:
    """The config of a job of `hone.art.TrainableModel` with these fields, as the server reads it."""
    spec = art.TrainableModel(name="a", base_model="b", **fields).spec()
    return train_config(normalize_spec(spec).defaults, chosen_keys(config, {}), "config")


async def test_the_page_names_the_default_of_every_client(serve: Serve):
    of_sdk = train_config({}, chosen_keys(TrainConfig(loss="dapo"), {}), "config").learning_rate
    assert table() == {
        "`hone.TrainableModel.train`": of_sdk,
        "`POST /v1/training/jobs`": train_config({}, {}, "config").learning_rate,
        "`train_sft`": TrainSFTConfig().job_keys()["learning_rate"],
        "YAML": ScheduledTrainConfig().job_keys(0, 1)["learning_rate"],
        "`hone.art.TrainableModel.train`": of_wing(None).learning_rate,
        "`hone.art.ArtBackend`": (await sent_by_art_package(serve, {}))["learning_rate"],
        # tests/server/http/test_art_routes.py sends such a request over HTTP.
        "ART's HTTP client": ART_DEFAULTS["learning_rate"],
    }
    assert set(table().values()) == {5e-5, 5e-6}


@pytest.mark.parametrize(
    ("config", "fields", "rate"),
    [
        (None, {}, 5e-6),
        (art.TrainConfig(), {}, 5e-6),
        (art.TrainConfig(beta=0.1), {"defaults": {"beta": 0.2}}, 5e-6),
        (art.TrainConfig(beta=0.1), {"defaults": {"learning_rate": 1e-3}}, 1e-3),
        (None, {"trainer_args": {"learning_rate": 1e-3}}, 1e-3),
        (None, {"trainer_args": {"learning_rate": None}}, 5e-6),
        (None, {"_internal_config": {"trainer_args": {"learning_rate": 1e-3}}}, 1e-3),
        (art.TrainConfig(learning_rate=5e-5), {"defaults": {"learning_rate": 1e-3}}, 5e-5),
        (art.TrainConfig(learning_rate=5e-6), {"defaults": {"learning_rate": 1e-3}}, 5e-6),
    ],
)
def test_a_script_with_art_s_names_has_art_s_rate_unless_somebody_set_one(
    config: art.TrainConfig | None, fields: dict[str, Any], rate: float
):
    assert of_wing(config, **fields).learning_rate == rate


def test_rates_by_step_are_not_replaced_by_art_s_default():
    assert of_wing(None, defaults={"learning_rates": [1e-3, 1e-4]}).learning_rate_of(1) == 1e-4


def test_art_s_train_config_has_art_s_default():
    assert art.TrainConfig().learning_rate == art.types.TrainConfig().learning_rate == 5e-6
    assert TrainConfig().learning_rate == 5e-5
    assert isinstance(art.TrainConfig(), TrainConfig)


@pytest.mark.parametrize(
    ("written", "trainer_args", "sent"),
    [
        ({"learning_rate": 5e-5}, {"learning_rate": 1e-3}, 5e-5),
        ({}, {"learning_rate": 1e-3}, None),  # the server has it from the registration
        ({"learning_rate": None}, {"learning_rate": 1e-3}, None),
        ({"learning_rate": None}, {}, 5e-6),
    ],
)
async def test_art_s_package_sends_its_default_only_where_nobody_set_a_rate(
    serve: Serve, written: dict[str, Any], trainer_args: dict[str, Any], sent: float | None
):
    config = await sent_by_art_package(serve, written, {"trainer_args": trainer_args})
    assert config.get("learning_rate") == sent
