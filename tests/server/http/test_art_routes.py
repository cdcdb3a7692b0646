"""ART's wire protocol, over HTTP, with bodies as its clients 0.5.4 and NAT's plugin send them.

tests/art drives the clients themselves; these are the same bodies without their environments.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server
from tests.server.small_server import LearnerHere
from tests.server.worlds import art_model

from hone.errors import TrainingError
from hone.server.http.auth import inference_key
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import ModelKey, stored_name

ASKED = [{"role": "user", "content": "the weather in the city"}]
KEY = ModelKey("proof", "agent")


def model(base: Path | str, **changes: Any) -> dict[str, Any]:
    return art_model("agent", "proof", str(base), learning_rate=1e-3, beta=0.0) | changes


class Learner(LearnerHere):
    """One that can be told to fail, or to wait, when its second gradient step begins."""

    reached = threading.Event()
    go_on = threading.Event()
    failing = False

    def train(self, groups: Any, config: Any, *, on_progress: Any = None, **more: Any) -> Any:
        def report(at: dict[str, Any]) -> None:
            if (at["phase"], at["step"]) != ("train", 1):
                on_progress(at)
                return
            time.sleep(0.15)  # what comes sooner after the last progress is held back
            on_progress(at)
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S), "the test let the learner wait"
            if self.failing:
                raise TrainingError("it was told to fail")

        return super().train(groups, config, on_progress=report, **more)


class ArtServer:
    """A running server with a real engine and a learner in this process, and a client of it."""

    def __init__(self, server: Server, base: Path) -> None:
        self.state = server.state
        self.base = base
        self.http = httpx.Client(base_url=server.control_url, timeout=PATIENCE_S)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def answer(self, name: str = "agent", **options: Any) -> dict[str, Any]:
        """One choice as an OpenAI client would hold it; nobody asks for log-probabilities."""
        body = {"model": name, "messages": ASKED, "max_tokens": 6, **options}
        got = self.post("/v1/chat/completions", body)
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]

    def groups(self, count: int = 2) -> list[dict[str, Any]]:
        return [
            {
                "trajectories": [
                    {
                        "messages_and_choices": [*ASKED, self.answer()],
                        "tools": None,
                        "additional_histories": [],
                        "reward": float(reward),
                        "metrics": {"ok": bool(reward)},
                        "auto_metrics": {},
                        "metadata": {},
                        "logs": [],
                    }
                    for reward in (0, 1)
                ],
                "exceptions": [],
            }
            for _ in range(count)
        ]

    def training_call(self, groups: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
        return {
            "model": model(self.base),
            "trajectory_groups": groups,
            "config": {"learning_rate": 5e-05, "beta": 0.0},
            "dev_config": {},
            "verbose": False,
        } | changes

    def prepared(self) -> "ArtServer":
        got = self.post(
            "/_prepare_backend_for_training", {"model": model(self.base), "config": None}
        )
        assert got.status_code == 200, got.text
        return self

    def step(self) -> int:
        return self.post("/_get_step", model(self.base)).json()

    def directory(self, key: ModelKey = KEY) -> Path:
        return self.state.checkpoints.model_dir(key)

    def history(self) -> list[dict[str, Any]]:
        return self.state.checkpoints.history(KEY)


@pytest.fixture
def art(tmp_path: Path, tiny_model: Path) -> Iterator[ArtServer]:
    Learner.reached.clear()
    Learner.go_on.set()
    Learner.failing = False
    with served(tmp_path, tiny_model, Learner) as art:
        yield art


@contextmanager
def served(
    root: Path, model: Path, start_learner: Callable[..., Any], **more: Any
) -> Iterator[ArtServer]:
    settings = Settings(root=root / "hone", device="cpu", learner_threads=1, **more)
    server = Server(State(settings, start_learner=start_learner), None).start()
    art = ArtServer(server, model)
    yield art
    art.http.close()
    server.stop()


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


# ---- the loop ---------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_whole_loop_with_bodies_that_a_worker_process_reads(
    tmp_path: Path, tiny_model: Path
) -> None:
    Learner.go_on.set()
    with served(tmp_path, tiny_model, Learner, large_body_bytes=500, body_processes=1) as art:
        test_a_whole_loop(art)
        assert len(art.state.workers.pids) == 1
        logged = art.directory() / "trajectories"
        for split in ("val", "train"):
            lines = (logged / split / "0000.jsonl").read_text().splitlines()
            assert [len(json.loads(line)["trajectories"]) for line in lines] == [2, 2]
        assert any("val/reward" in entry or "reward" in str(entry) for entry in art.history())


def test_a_whole_loop(art: ArtServer) -> None:
    assert art.post("/register", model(art.base)).json() is None
    assert art.step() == 0
    prepared = art.post("/_prepare_backend_for_training", {"model": model(art.base)})
    assert prepared.json() == ["http://127.0.0.1:8000/project/proof/v1", "default"]
    before = art.answer(temperature=0)
    assert before["logprobs"]["content"][0]["token"].startswith("token_id:")

    groups = art.groups()
    logged = {"model": model(art.base), "trajectory_groups": groups, "split": "val"}
    assert art.post("/_log", logged).json() is None
    (line,) = lines_of(art.post("/_train_model", art.training_call(groups)))
    assert line["num_gradient_steps"] == 1
    assert line["data/step_num_gradient_steps"] == 1.0
    assert line["loss/learning_rate"] == 1e-3  # its user's, and not the plugin's constant
    assert line["data/step_num_groups_trainable"] == 2
    assert line["data/step_num_trajectories"] == 4
    assert line["resolve/matched"] == 4
    assert line["loss/train"] == line["learn/loss"]
    assert all(type(value) in (int, float) for value in line.values())

    assert art.step() == 1
    after, untrained = art.answer(temperature=0), art.answer("agent@0", temperature=0)
    assert untrained["logprobs"] == before["logprobs"]
    assert after["logprobs"] != before["logprobs"]
    (job,) = art.state.jobs.list()
    assert (job.config.learning_rate, job.step) == (1e-3, 1)

    # Flat groups: the next step has the same adapter.
    for group in groups:
        for trajectory in group["trajectories"]:
            trajectory["reward"] = 0.5
    (line,) = lines_of(art.post("/_train_model", art.training_call(groups)))
    assert line["num_gradient_steps"] == 0
    assert art.step() == 2
    first, second = art.state.checkpoints.list(KEY)[1:]
    assert first.sha256 == second.sha256
    assert art.post("/close").json() is None
    assert art.step() == 2
    _check_what_was_left(art)


def _check_what_was_left(art: ArtServer) -> None:
    """Of the loop above: rewards 0 and 1 logged as val at step 0; trained on at 0 and, flat, at 1."""
    history = [{k: v for k, v in line.items() if k != "recorded_at"} for line in art.history()]
    rewards = [(line["step"], line[k]) for line in history for k in line if k.endswith("/reward")]
    assert rewards == [(0, 0.5), (0, 0.5), (1, 0.5)]
    assert history[0] == {
        "val/reward": 0.5,
        "val/exception_rate": 0.0,
        "val/reward_std_dev": 0.5,
        "val/ok": 0.5,
        "step": 0,
    }
    steps = {line["step"]: line for line in history if "train/num_groups_submitted" in line}
    assert steps[1]["train/num_groups_trainable"] == 2
    assert steps[1]["train/learning_rate"] == 1e-3
    assert "train/loss" in steps[1]
    assert steps[2]["train/num_groups_trainable"] == 0
    assert "train/loss" not in steps[2]
    logged = (art.directory() / "trajectories" / "val" / "0000.jsonl").read_text().splitlines()
    group = json.loads(logged[0])
    assert len(logged) == 2
    assert group["trajectories"][0]["messages_and_choices"][1]["logprobs"]["content"]
    assert (art.directory() / "trajectories" / "train" / "0001.jsonl").exists()


def test_answers_of_an_older_step_are_trained_and_counted_in_a_metric(art: ArtServer) -> None:
    art.prepared()
    groups = art.groups(1)
    for step in (1, 2):
        (line,) = lines_of(art.post("/_train_model", art.training_call(groups)))
        assert art.step() == step
        # Both jobs were sampled at step 0.
        assert line["learn/staleness"] == step - 1
    # Who wants the bound asks for it in the model's defaults, which ART's words cannot say.
    assert [job.config.max_staleness for job in art.state.jobs.list()] == [None, None]


def test_the_learning_rate_that_a_client_sends_is_used(art: ArtServer) -> None:
    """Whatever default the model has. A client that sends none gets the model's, then ART's."""
    art.prepared()
    groups = art.groups(1)
    own = {"trainer_args": {"learning_rate": 1e-3}}
    for internal, config, used in (
        (own, {"learning_rate": 5e-5, "beta": 0.0}, 5e-5),
        (own, {"learning_rate": 5e-6, "beta": 0.0}, 5e-6),  # ART's client, if its user sets none
        (own, {}, 1e-3),
        (None, {"learning_rate": 5e-5}, 5e-5),
        (None, {}, 5e-6),
    ):
        sent = {"model": model(art.base, _internal_config=internal), "config": config}
        lines = lines_of(art.post("/_train_model", art.training_call(groups) | sent))
        assert [line["loss/learning_rate"] for line in lines] == [used], (internal, config)


def test_one_line_for_every_gradient_step(art: ArtServer) -> None:
    art.prepared()
    # Nine groups at eight to an optimizer step.
    lines = lines_of(art.post("/_train_model", art.training_call(art.groups(9))))
    assert [line["num_gradient_steps"] for line in lines] == [2, 2]
    assert [line["data/step_num_gradient_steps"] for line in lines] == [2.0, 2.0]
    assert [line["loss/learning_rate"] for line in lines] == [1e-3, 1e-3]
    assert "loss/train" not in lines[0]
    assert "loss/train" in lines[1]


def test_the_reply_ends_when_the_new_step_is_served(art: ArtServer) -> None:
    art.prepared()
    with art.http.stream("POST", "/_train_model", json=art.training_call(art.groups())) as reply:
        assert reply.status_code == 200
        assert list(reply.iter_lines())
        assert art.state.serving.newest(art.state.models.get(KEY))[0] == 1
        assert art.state.jobs.list()[0].state == "done"


# ---- what goes wrong --------------------------------------------------------------------------


def test_a_failure_before_the_stream_has_a_status_and_a_reason(
    tmp_path: Path, tiny_model: Path
) -> None:
    with served(tmp_path, tiny_model, _no_learner) as art:
        art.prepared()
        got = art.post("/_train_model", art.training_call(art.groups()))
        (job,) = art.state.jobs.list()
        assert got.status_code == 500
        assert got.json()["detail"].startswith(
            f"job {job.id!r} failed: TrainingError: there is no memory\nIts trace is in "
        )
        assert "Traceback" not in got.text
        assert art.step() == 0


def _no_learner(*_: Any, **__: Any) -> Any:
    raise TrainingError("there is no memory")


def test_a_failure_after_the_stream_began_breaks_the_body(art: ArtServer) -> None:
    art.prepared()
    Learner.failing = True
    Learner.go_on.clear()
    call = art.training_call(art.groups(9))
    with art.http.stream("POST", "/_train_model", json=call) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert json.loads(next(lines))["num_gradient_steps"] == 2
        Learner.go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert art.state.jobs.list()[0].state == "failed"
    assert art.step() == 0


def test_a_job_is_answered_even_if_nothing_can_be_logged(
    art: ArtServer, caplog: pytest.LogCaptureFixture
) -> None:
    art.prepared()
    logged = art.directory() / "trajectories" / "train"
    logged.mkdir(parents=True)
    (logged / "0000.jsonl").symlink_to("/dev/full")
    (art.directory() / "history.jsonl").mkdir()  # cannot be written to
    groups = art.groups()
    (line,) = lines_of(art.post("/_train_model", art.training_call(groups)))
    assert line["num_gradient_steps"] == 1 and art.step() == 1
    (job,) = art.state.jobs.list()  # a client that gets an error trains a second time
    warnings = [record for record in caplog.records if "not logged" in record.getMessage()]
    assert [record.getMessage() for record in warnings] == [
        "ART: the trajectories of a job, or their means, were not logged",
        "ART: the metrics of a job were not logged",
    ]
    for record, reason in zip(warnings, ("DiskFull", "StorageError"), strict=True):
        fields: dict[str, str] = record.__dict__["fields"]
        assert fields["job"] == job.id and fields["reason"].startswith(f"{reason}: {logged.root}")
    # A call that only logs may be repeated.
    body = {"model": model(art.base), "trajectory_groups": groups, "split": "val"}
    assert art.post("/_log", body).status_code == 503


def test_a_job_continues_when_its_client_disconnects(art: ArtServer) -> None:
    art.prepared()
    Learner.go_on.clear()
    call = art.training_call(art.groups(9))
    with art.http.stream("POST", "/_train_model", json=call) as reply:
        next(reply.iter_lines())
    Learner.go_on.set()
    deadline = time.monotonic() + PATIENCE_S
    while art.state.jobs.list()[0].state == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert art.state.jobs.list()[0].state == "done"
    assert art.step() == 1


def test_a_server_that_stops_breaks_the_body_and_keeps_the_job(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = Settings(root=tmp_path / "hone", device="cpu", learner_threads=1)
    state = State(settings, start_learner=Learner)
    # Nobody is cut off by the end of this grace: who waits for it waits too long.
    server = Server(state, None, grace_s=600).start()
    art = ArtServer(server, tiny_model).prepared()
    Learner.reached.clear()
    Learner.go_on.clear()
    call = art.training_call(art.groups(9))
    got: list[httpx.Response] = []
    with art.http.stream("POST", "/_train_model", json=call) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines))["num_gradient_steps"] == 2
        # The second one waits behind it, and has no status yet.
        second = threading.Thread(target=lambda: got.append(art.post("/_train_model", call)))
        second.start()
        while len(state.jobs.list()) < 2:
            time.sleep(0.02)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
        second.join(PATIENCE_S)
    Learner.go_on.set()
    stopping.join(PATIENCE_S)
    (answer,) = got
    assert answer.status_code == 503
    assert "this server stops. The job goes back to the queue" in answer.json()["detail"]
    again = State(settings)
    # The learner went on as soon as it could, so the first may have come to its end.
    assert {job.state for job in again.jobs.list()} <= {"queued", "done"}
    again.store.close()
    art.http.close()


def test_a_cancelled_job_is_a_conflict(art: ArtServer) -> None:
    art.prepared()
    Learner.go_on.clear()
    call = art.training_call(art.groups(9))
    got: list[httpx.Response] = []
    # Of the second call nothing has begun: it waits behind the first.
    first = threading.Thread(target=lambda: art.post("/_train_model", call))
    second = threading.Thread(target=lambda: got.append(art.post("/_train_model", call)))
    first.start()
    assert Learner.reached.wait(PATIENCE_S)
    second.start()
    while len(art.state.jobs.list()) < 2:
        time.sleep(0.02)
    waiting = art.state.jobs.list()[0]
    assert art.post(f"/v1/training/jobs/{waiting.id}/cancel").json()["state"] == "cancelled"
    second.join(PATIENCE_S)
    Learner.go_on.set()
    first.join(PATIENCE_S)
    assert got[0].status_code == 409
    assert "was cancelled" in got[0].json()["detail"]
    assert art.step() == 1


def test_a_wrong_trajectory_is_named_by_arts_path(art: ArtServer) -> None:
    art.prepared()
    groups = art.groups()
    choice = groups[1]["trajectories"][0]["messages_and_choices"][1]
    choice["logprobs"]["content"][0]["logprob"] = 7.0
    got = art.post("/_train_model", art.training_call(groups))
    assert got.status_code == 422
    place = ["body", "trajectory_groups", 1, "trajectories", 0, "messages_and_choices", 1]
    assert got.json()["detail"][0]["loc"][:7] == place
    assert not art.state.jobs.list()
    assert not (art.directory() / "trajectories").exists()


# ---- without an engine ------------------------------------------------------------------------


@pytest.fixture
def idle(make_server: MakeServer, tiny_model: Path) -> Iterator[ArtServer]:
    """A server that cannot load anything: what these routes do must not need it."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing may be loaded")

    server = make_server(open_engine=refuse)
    art = ArtServer(server, tiny_model)
    yield art
    art.http.close()


def test_registering_and_the_step_load_nothing(idle: ArtServer) -> None:
    assert idle.post("/register", model(idle.base)).json() is None
    assert idle.post("/_get_step", model(idle.base)).json() == 0
    assert idle.post("/_get_step", {"model": model(idle.base)}).json() == 0
    spec = idle.state.models.get(KEY).spec
    assert spec.token_ids_as_text
    assert spec.defaults == {"learning_rate": 1e-3, "beta": 0.0}
    assert spec.not_applicable == ["engine_args.gpu_memory_utilization"]


def test_a_model_without_weights_is_refused_and_not_registered(
    idle: ArtServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in ("/register", "/_prepare_backend_for_training"):
        got = idle.post(path, model("no/such-weights"))
        assert got.status_code == 422
        assert "no model called 'no/such-weights' was found" in json.dumps(got.json()["detail"])
    assert idle.state.models.list() == []
    assert not idle.directory(KEY).exists()
    assert idle.post("/register", model(idle.base)).status_code == 200


def test_a_model_served_elsewhere_is_logged_without_its_key(idle: ArtServer) -> None:
    theirs = {"name": "gpt", "project": "proof", "trainable": False, "config": None}
    theirs |= {"inference_api_key": "sk-secret", "inference_base_url": "http://x/v1"}
    assert idle.post("/register", theirs).status_code == 200
    assert idle.post("/_get_step", theirs).json() == 0
    one = {"messages_and_choices": ASKED, "reward": 2.0, "tools": None}
    group = {"trajectories": [one], "exceptions": [{"type": "E", "message": "m", "traceback": ""}]}
    body = {"model": theirs, "trajectory_groups": [group], "split": "test"}
    assert idle.post("/_log", body).status_code == 200
    key = ModelKey("proof", "gpt")
    (line,) = idle.state.checkpoints.history(key)
    assert (line["test/reward"], line["test/exception_rate"], line["step"]) == (2.0, 0.5, 0)
    logged = (idle.directory(key) / "trajectories" / "test" / "0000.jsonl").read_text()
    assert json.loads(logged) == group
    for file in idle.state.settings.root.rglob("*"):
        assert file.is_dir() or b"sk-secret" not in file.read_bytes()
    got = idle.post("/_prepare_backend_for_training", {"model": theirs, "config": None})
    assert got.status_code == 422


@pytest.mark.parametrize(
    ("path", "changes", "status", "says"),
    [
        ("/register", {"name": "../../etc"}, 422, "name"),
        ("/register", {"project": "../logs"}, 422, "project"),
        ("/register", {"_internal_config": {"engine_args": {"tensor_parallel_size": 2}}}, 400, "1"),
        ("/register", {"_internal_config": {"peft_args": {"r": 0}}}, 422, "peft_args"),
        ("/_delete_checkpoints", {"name": "nobody"}, 404, "nobody"),
        ("/_delete_checkpoints?benchmark_smoothing=0", {}, 422, "benchmark_smoothing"),
    ],
)
def test_what_is_refused(
    idle: ArtServer, path: str, changes: dict[str, Any], status: int, says: str
) -> None:
    got = idle.post(path, model(idle.base, **changes))
    assert got.status_code == status
    assert says in json.dumps(got.json()["detail"])


def test_another_adapter_under_the_same_name_is_a_conflict(idle: ArtServer) -> None:
    idle.post("/register", model(idle.base))
    got = idle.post("/register", model(idle.base, _internal_config={"peft_args": {"r": 4}}))
    assert got.status_code == 409
    assert "rank 8" in got.json()["detail"]


def test_each_project_has_models_of_its_own_names(prose: Prose, art: ArtServer) -> None:
    """Clients ask for a model by its name alone, at the address that they were given."""
    names = ("agent", "my agent/v2")
    for project in ("proof", "board games/2048"):
        stored = stored_name(project)
        for name in names:
            theirs = model(art.base, project=project, name=name)
            assert art.post("/register", theirs).status_code == 200
            url, _ = art.post("/_prepare_backend_for_training", {"model": theirs}).json()
            path = urlsplit(url).path
            assert path == f"/project/{stored}/v1"
            request = {"model": name, "messages": ASKED, "max_tokens": 2}
            answer = art.post(f"{path}/chat/completions", request).json()
            (call,) = art.state.calls.get([answer["choices"][0]["call_id"]])
            assert call.model == f"{stored}/{stored_name(name)}"
            assert art.post("/_get_step", theirs).json() == 0
            written = json.loads(
                (art.directory(ModelKey(stored, stored_name(name))) / "model.json").read_text()
            )
            assert (written["project"], written["name"]) == (project, name)
        listed = [one["id"] for one in art.http.get(f"/project/{stored}/v1/models").json()["data"]]
        assert "agent" in listed and "agent@0" in listed
    got = art.post("/v1/chat/completions", {"model": "agent", "messages": ASKED})
    assert got.status_code == 409, "without a project it is either one's"
    prose(got.json()["error"]["message"])
    assert got.json()["error"]["code"] == "model_ambiguous"
    assert got.headers["x-should-retry"] == "false", "or its client repeats the request"


def test_a_model_with_the_name_of_another_projects_model_hides_nothing(art: ArtServer) -> None:
    """A model of project default may be called `p/m`, before or after project p has its m."""
    theirs, squatter = model(art.base, project="p", name="m"), stored_name("p/m")
    later = model(art.base, project="default", name="q/m")
    for sent in (theirs, model(art.base, project="default", name="p/m"), later):
        assert art.post("/register", sent).status_code == 200
    assert art.post("/register", model(art.base, project="q", name="m")).status_code == 200

    def answering(name: str, path: str = "/v1") -> str:
        request = {"model": name, "messages": ASKED, "max_tokens": 2}
        answer = art.post(f"{path}/chat/completions", request)
        assert answer.status_code == 200, answer.text
        (call,) = art.state.calls.get([answer.json()["choices"][0]["call_id"]])
        return call.model

    assert answering("p/m") == answering("p/m@latest") == answering("p/m@0") == "p/m"
    assert answering("m", "/project/p/v1") == answering("p/m", "/project/p/v1") == "p/m"
    assert answering("q/m") == "q/m"
    assert answering("p/m", "/project/default/v1") == f"default/{squatter}"
    assert answering(f"default/{squatter}") == answering(squatter) == f"default/{squatter}"
    for sent in (theirs, later):
        assert art.post("/_get_step", sent).json() == 0


@pytest.mark.parametrize("name", ["pull_from_s3", "push_to_s3", "deploy", "fork_checkpoint"])
def test_routes_that_are_not_implemented_say_so(idle: ArtServer, name: str) -> None:
    got = idle.post(f"/_experimental_{name}", {"model": model("tiny")})
    assert got.status_code == 501
    assert "not in this version" in got.json()["detail"]


def test_a_split_is_a_name_and_not_a_path(idle: ArtServer) -> None:
    body = {"model": model("tiny"), "trajectory_groups": [], "split": "../../x"}
    assert idle.post("/_log", body).status_code == 422


# ---- checkpoints ------------------------------------------------------------------------------


def _write_steps(art: ArtServer, count: int) -> None:
    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_text("weights")
        return "0" * 64

    for step in range(count):
        art.state.checkpoints.write(KEY, step, fill)


def test_the_best_by_a_metric_and_the_newest_are_kept(idle: ArtServer) -> None:
    idle.post("/register", model(idle.base))
    _write_steps(idle, 5)
    for step, reward in enumerate([0.1, 0.9, 0.3]):
        idle.state.checkpoints.log(KEY, step, {"reward": reward, "cost": -reward}, "val")
    query = {"benchmark": "val/reward", "benchmark_smoothing": "1.0"}
    assert idle.post("/_delete_checkpoints", model("tiny"), params=query).json() is None
    assert [c.step for c in idle.state.checkpoints.list(KEY)] == [1, 4]


def test_unnamed_checkpoints_are_deleted_except_the_newest(idle: ArtServer) -> None:
    idle.post("/register", model(idle.base))
    _write_steps(idle, 5)
    body = {"model": model("tiny"), "steps_to_keep": [2]}
    assert idle.post("/_delete_checkpoint_files", body).json() is None
    assert [c.step for c in idle.state.checkpoints.list(KEY)] == [2, 4]


# ---- addresses --------------------------------------------------------------------------------


def test_the_address_is_the_one_the_client_used(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(api_key="k1", inference_port=8123, allowed_hosts=("gpu.example",))
    body = {"model": model(tiny_model), "config": {"server_args": {"api_key": "mine"}}}
    headers = {"Host": "gpu.example:7623", "Authorization": "Bearer k1"}
    got = httpx.post(
        f"{server.control_url}/_prepare_backend_for_training",
        json=body,
        headers=headers,
        timeout=PATIENCE_S,
    )
    key = inference_key(server.state.settings)
    assert got.json() == ["http://gpu.example:8123/project/proof/v1", key] and key != "k1"


def test_without_a_key_the_client_gets_its_own_key_back(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server()
    body = {"model": model(tiny_model), "config": {"server_args": {"api_key": "mine", "port": 1}}}
    url = f"{server.control_url}/_prepare_backend_for_training"
    got = httpx.post(url, json=body, timeout=PATIENCE_S)
    assert got.json() == ["http://127.0.0.1:8000/project/proof/v1", "mine"]
