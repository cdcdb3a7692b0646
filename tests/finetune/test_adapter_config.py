"""finetune/adapter_config.py: the seed's defaults, keys that depend on each other, what is sent."""

from typing import Any

import pytest

from hone import LocalBackend
from hone.finetune.adapter import HoneServerAdapter, HoneServerAdapterConfig


def config(**blocks: Any) -> HoneServerAdapterConfig:
    return HoneServerAdapterConfig.model_validate({"backend": {}, **blocks})


def test_the_seed_s_defaults():
    backend, training = config().backend, config().training
    assert (backend.name, backend.project) == ("trainer_run", "trainer_project")
    assert backend.base_model == "Qwen/Qwen2.5-7B-Instruct"
    assert (backend.api_key, backend.delete_old_checkpoints) == ("default", False)
    assert (training.learning_rate, training.beta) == (5e-5, 0.0)
    assert config(training={"learning_rate": "1e-6"}).training.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ({"ip": "localhost"}, "ip is 'localhost' but port is not set; set both"),
        ({"port": 7623}, "port is 7623 but ip is not set; set both"),
        ({"ip": "http://gpu1", "port": 7623}, "expected a host name or an address, without"),
        ({"ip": "gpu1:7623", "port": 7623}, "expected a host name or an address, without"),
        ({"inference_port": 8000}, "inference_port is 8000 but ip is not set"),
        (
            {"advertise_url": "http://gpu1:8000"},
            "own server listens on 127.0.0.1 only, where other",
        ),
        ({"advertise_url": "gpu1:8000"}, "'gpu1:8000' must look like http://HOST:PORT"),
        (
            {"ip": "h", "port": 1, "engine": "vllm"},
            "engine is for the run's own server, and ip is 'h'",
        ),
        ({"engine": "vlm"}, "'auto', 'embedded' or 'vllm'"),
        ({"engine": {"url": "http://h:1", "python": "p"}}, "'auto', 'embedded' or 'vllm'"),
        ({"engine": {"url": "http://h:1"}, "engine_url": "http://h:2"}, "'auto', 'embedded' or"),
        ({"nmae": "x"}, "nmae"),
    ],
)
def test_keys_that_do_not_go_together(backend: Any, says: str):
    with pytest.raises(ValueError, match=says):
        config(backend=backend)


def test_the_engine_of_the_run_s_own_server():
    assert config().backend.server_options() == {}
    chosen = config(backend={"engine": "vllm", "engine_python": "/opt/vllm/bin/python"}).backend
    options = {"engine": "vllm", "engine_python": "/opt/vllm/bin/python"}
    assert chosen.server_options() == options
    adapter = HoneServerAdapter(config(backend=options))
    assert isinstance(adapter.backend, LocalBackend) and adapter.backend.settings == options


@pytest.mark.parametrize("key", ["engine_url", "engine"])
def test_a_running_vllm_for_the_run_s_own_server(key: str):
    url = "http://gpu1:8000"
    backend = {key: {"url": url} if key == "engine" else url}
    adapter = HoneServerAdapter(config(backend=backend))
    assert isinstance(adapter.backend, LocalBackend)
    assert adapter.backend.settings == {"engine_url": url}
    assert backend[key] in (url, {"url": url})  # the document is as it was written
    with pytest.raises(ValueError, match="engine_url is for the run's own server, and ip is 'h'"):
        config(backend={**backend, "ip": "h", "port": 1})


def test_what_is_sent_of_training():
    # beta and learning_rate always: their defaults are this adapter's; the rest only as written.
    training = config(training={"loss": "dapo", "plot_tensors": True}).training
    assert training.job_keys(0, 20) == {"loss": "dapo", "learning_rate": 5e-5, "beta": 0.0}
    falling = config(training={"learning_rate": 1e-4, "schedule": "linear"}).training
    # Four jobs: 1, 3/4, 1/2, 1/4 of it.
    assert [falling.job_keys(i, 4)["learning_rate"] for i in range(4)] == pytest.approx(
        [1e-4, 7.5e-5, 5e-5, 2.5e-5]
    )
