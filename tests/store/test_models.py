"""Registered models: what a key keeps, what a name means."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.prose import Prose

from hone.errors import AmbiguousModel, Conflict, NotFound
from hone.store import models
from hone.store.database import Store
from hone.store.models import ModelStore
from hone.types import ModelKey, ModelSpec, stored_name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state.sqlite", (models.SCHEMA,))
    yield opened
    opened.close()


@pytest.fixture
def known(store: Store) -> ModelStore:
    return ModelStore(store)


def test_registering_again_changes_nothing(known: ModelStore, store: Store):
    spec = ModelSpec(name="agent", base_model="tiny", defaults={"learning_rate": 1e-4})
    first = known.register(spec)
    assert known.register(spec) == first
    assert ModelStore(store).list() == [first]  # another reader of the same file
    assert first.key == ModelKey("default", "agent") and first.spec == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_model", "other"), ("rank", 16), ("alpha", 32.0), ("seed", 1)],
)
def test_what_checkpoints_depend_on_cannot_change(prose: Prose, known, field, value):
    known.register(ModelSpec(name="agent", base_model="tiny"))
    changed = ModelSpec(**{"name": "agent", "base_model": "tiny", field: value})
    with pytest.raises(Conflict) as caught:
        known.register(changed)
    prose(caught)
    assert known.find("agent").spec == ModelSpec(name="agent", base_model="tiny")


def test_settings_of_a_model_may_be_registered_again(known: ModelStore):
    first = known.register(ModelSpec(name="agent", base_model="tiny"))
    changed = ModelSpec(
        name="agent", base_model="tiny", token_ids_as_text=True, defaults={"beta": 0.1}
    )
    second = known.register(changed)
    assert known.get(first.key) == second
    assert second.spec == changed and second.created_at == first.created_at


def test_a_bare_name_means_the_one_project_that_has_it(prose: Prose, known: ModelStore):
    alone = known.register(ModelSpec(name="alone", project="p", base_model="tiny"))
    known.register(ModelSpec(name="agent", project="p", base_model="tiny"))
    second = known.register(ModelSpec(name="agent", project="q", base_model="tiny"))
    assert known.find("alone") == known.find("p/alone") == alone
    assert known.find("q/agent") == second
    with pytest.raises(Conflict) as caught:
        known.find("agent")
    prose(caught)


@pytest.mark.parametrize("order", [1, -1])
def test_the_exact_key_wins_over_a_name_with_a_slash(prose: Prose, known: ModelStore, order: int):
    """ART's users write `p/m` in project default, or in any other; hone stores a derived name."""
    written = stored_name("p/m")
    keys = [ModelKey("p", "m"), ModelKey("default", written), ModelKey("q", written)]
    for key in keys[::order]:
        known.register(ModelSpec(name=key.name, project=key.project, base_model="tiny"))
    for key in keys:
        assert known.find(str(key)).key == known.get(key).key == key
        assert known.find("p/m", "r").key == keys[0]
    assert known.find("p/m").key == known.find("m").key == keys[0]
    for key in keys[1:]:
        assert known.find("p/m", key.project).key == key
    assert known.find("p/m", "p").key == keys[0]
    with pytest.raises(AmbiguousModel) as caught:
        known.find(written)
    prose(caught)


def test_a_key_does_not_match_the_name_of_another_model(prose: Prose, known: ModelStore):
    squatter = known.register(ModelSpec(name=stored_name("p/m"), base_model="tiny"))
    assert known.find("p/m") == squatter
    with pytest.raises(NotFound) as caught:
        known.get(ModelKey("p", "m"))
    prose(caught)


def test_names_that_differ_in_case_are_refused(prose: Prose, known: ModelStore):
    known.register(ModelSpec(name="agent", base_model="tiny"))
    for spec in (
        ModelSpec(name="Agent", base_model="tiny"),
        ModelSpec(name="agent", project="Default", base_model="tiny"),
    ):
        with pytest.raises(Conflict) as caught:
            known.register(spec)
        prose(caught)
    known.register(ModelSpec(name="Agent", project="other", base_model="tiny"))


def test_an_unknown_name_among_many_names_the_nearest(prose: Prose, known: ModelStore):
    for number in range(40):
        known.register(ModelSpec(name=f"a-{number}", base_model="tiny"))
    known.register(ModelSpec(name="classifier", project="p", base_model="tiny"))
    with pytest.raises(NotFound) as raised:
        known.find("clasifier")
    prose(raised)
    with pytest.raises(NotFound) as raised:
        known.find("z" * 10_000)
    prose(raised)
    assert len(str(raised.value)) < 500


def test_an_unknown_name_lists_the_known_ones_and_guesses(prose: Prose, known: ModelStore):
    with pytest.raises(NotFound) as caught:
        known.find("agent")
    prose(caught)
    known.register(ModelSpec(name="agent", base_model="tiny"))
    with pytest.raises(NotFound) as caught:
        known.find("agnet")
    prose(caught)
    with pytest.raises(NotFound) as caught:
        known.get(ModelKey("other", "agent"))
    prose(caught)


def test_a_name_is_a_model_or_a_base_model_and_never_both(prose: Prose, known: ModelStore):
    with pytest.raises(Conflict) as caught:
        known.register(ModelSpec(name="tiny", base_model="tiny"))
    prose(caught)
    known.register(ModelSpec(name="agent", base_model="tiny"))
    with pytest.raises(Conflict) as caught:
        known.register(ModelSpec(name="tiny", base_model="other"))
    prose(caught)
    with pytest.raises(Conflict) as caught:
        known.register(ModelSpec(name="small", project="org", base_model="org/small"))
    prose(caught)
    with pytest.raises(Conflict) as caught:
        known.register(ModelSpec(name="second", base_model="agent"))
    prose(caught)
    assert [str(record.key) for record in known.list()] == ["default/agent"]


def test_models_of_one_base(known: ModelStore):
    for name, base in (("b", "tiny"), ("a", "tiny"), ("c", "other")):
        known.register(ModelSpec(name=name, base_model=base))
    assert [record.key.name for record in known.on_base("tiny")] == ["a", "b"]
