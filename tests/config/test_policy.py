"""Which entry of `llms` is trained, and the model name that each entry sends."""

from pathlib import Path

import pytest
from tests.evaluation.made import call
from tests.prose import Prose

from hone.config.policy import Trained, choose_policy, policy_calls, sent_name
from hone.config.schema import Document, read
from hone.errors import ConfigError

TRAINED = Trained(
    name="agent",
    names=frozenset({"agent", "p/agent"}),
    base_model="org/base",
    addresses=frozenset({("localhost", 7623), ("localhost", 8000)}),
)
HERE = "base_url: 'http://127.0.0.1:8000/v1', api_key: k"
ELSEWHERE = "base_url: 'http://127.0.0.1:9000/v1', api_key: k"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def document(directory: Path, target: str | None = None, **llms: str) -> Document:
    """Entries as YAML, without the braces."""
    lines = [f"  {key}: {{{entry}}}" for key, entry in llms.items()]
    lines = ["llms:", *lines] if llms else ["llms: {}"]
    if target is not None:
        lines += ["finetuning:", f"  target_model: {target}"]
    file = directory / "run.yml"
    file.write_text("\n".join(lines) + "\n")
    return read(file)


def sent(doc: Document, policy: str | None) -> dict[str, str | None]:
    return {
        key: sent_name(config, TRAINED, is_policy=key == policy) for key, config in doc.llms.items()
    }


def test_the_trainable_one(tmp_path: Path):
    """The rest of the entries on the same base is frozen, wherever a helper or a judge uses them."""
    doc = document(
        tmp_path,
        policy="_type: trainable",
        helper=f"_type: openai, model_name: org/base, {HERE}",
        judge=f"_type: openai, model_name: org/base@latest, {HERE}",
        pinned=f"_type: openai, model_name: org/base@0, {HERE}",
        older=f"_type: openai, model_name: agent@3, {HERE}",
        other=f"_type: openai, model_name: org/other, {HERE}",
        foreign=f"_type: openai, model_name: org/base, {ELSEWHERE}",
        public="_type: openai, model_name: org/base, api_key: k",
    )
    assert choose_policy(doc, TRAINED) == "policy"
    assert sent(doc, "policy") == {
        "policy": "agent",
        "helper": "agent@0",
        "judge": "agent@0",
        "pinned": "agent@0",
        "older": "agent@3",
        "other": "org/other",
        "foreign": "org/base",
        "public": "org/base",
    }


@pytest.mark.parametrize("name", ["org/base", "agent", "p/agent", "agent@latest"])
def test_the_only_entry_that_names_it_at_the_training_server(tmp_path: Path, name: str):
    doc = document(
        tmp_path,
        actor=f"_type: openai, model_name: {name}, {HERE}",
        judge=f"_type: openai, model_name: {name}, {ELSEWHERE}",
    )
    assert choose_policy(doc, TRAINED) == "actor"
    assert sent(doc, "actor") == {"actor": "agent", "judge": name}


@pytest.mark.parametrize("target", ["actor", "helper", "mine"])
def test_the_one_that_target_model_names(tmp_path: Path, target: str):
    doc = document(
        tmp_path,
        target,
        actor=f"_type: openai, model_name: org/base, {HERE}",
        helper="_type: trainable, model_name: org/base",
        third=f"_type: openai, model_name: mine, {ELSEWHERE}",
    )
    policy = choose_policy(doc, TRAINED)
    assert policy == {"mine": "third"}.get(target, target)
    names = {"actor": "agent@0", "helper": "agent@0", "third": "mine"}
    assert sent(doc, policy) == names | ({} if policy == "third" else {target: "agent"})


def test_a_model_s_name_as_target_means_the_entry_that_asks_for_it(tmp_path: Path):
    doc = document(tmp_path, "p/agent", actor=f"_type: openai, model_name: org/base, {HERE}")
    assert choose_policy(doc, TRAINED) == "actor"
    # Clients of the agent's own may be all that calls it.
    assert choose_policy(document(tmp_path, "agent"), TRAINED) is None
    assert choose_policy(document(tmp_path), TRAINED) is None


@pytest.mark.parametrize(
    ("target", "first", "second"),
    [
        (None, "_type: trainable", "_type: trainable, model_name: org/base"),
        (None, *[f"_type: openai, model_name: org/base, {HERE}"] * 2),
        ("org/base", *[f"_type: openai, model_name: org/base, {HERE}"] * 2),
    ],
)
def test_the_error_for_ambiguous_entries_names_the_key_to_set(
    prose: Prose, tmp_path: Path, target: str | None, first: str, second: str
):
    doc = document(tmp_path, target, a=first, b=second)
    with pytest.raises(ConfigError) as caught:
        choose_policy(doc, TRAINED)
    prose(caught)


def test_a_policy_of_one_fixed_step_cannot_be_trained(prose: Prose, tmp_path: Path):
    doc = document(tmp_path, policy="_type: trainable, model_name: agent@best")
    with pytest.raises(ConfigError) as caught:
        choose_policy(doc, TRAINED)
    prose(caught)
    # `hone eval` may ask for it.
    assert sent(doc, None) == {"policy": "agent@best"}


AT, OTHER, STEP = "localhost", "api.openai.com", 3


@pytest.mark.parametrize(
    ("model", "host", "step", "counts"),
    [
        ("agent", AT, STEP, True),
        ("p/agent", AT, STEP, True),
        ("agent@latest", AT, STEP, True),
        ("org/base", AT, STEP, True),  # inside a rollout the server answers it with the policy
        ("another-spelling-of-base", AT, STEP, True),
        ("agent", AT, None, True),  # the agent stopped reading before the end, which has the step
        ("agent@0", AT, 0, False),
        ("agent@best", AT, 2, False),
        ("critic", AT, STEP, False),  # another entry's model at the training server
        ("llama3", AT, None, False),  # another server on this machine
        ("gpt-4o", OTHER, None, False),
        ("agent", OTHER, STEP, False),
    ],
)
def test_which_calls_the_policy_answers(
    tmp_path: Path, model: str, host: str, step: int | None, counts: bool
):
    doc = document(
        tmp_path,
        policy="_type: trainable",
        judge=f"_type: openai, model_name: org/base, {HERE}",
        critic=f"_type: openai, model_name: critic, {HERE}",
    )
    calls = policy_calls(doc, TRAINED, "policy")
    assert calls.has(call(model=model, host=host, policy_step=step)) == counts


def test_with_foreign_endpoints_any_host_may_be_the_policy_s(tmp_path: Path):
    doc = document(tmp_path, judge=f"_type: openai, model_name: judge, {ELSEWHERE}")
    doc = doc.model_copy(
        update={"finetuning": doc.finetuning.model_copy(update={"allow_foreign_endpoint": True})}
    )
    calls = policy_calls(doc, TRAINED, None)
    assert calls.has(call(model="gpt-4o", host=OTHER, policy_step=None))
    assert not calls.has(call(model="judge", host=OTHER, policy_step=None))
