"""Work in thread pools belongs to the rollout that gave it, and to no other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hone
from hone.capture.scope import current

SUBMIT = ThreadPoolExecutor.__dict__["submit"]


def here(_: object = None) -> str | None:
    scope = current()
    return None if scope is None else scope.rollout


def test_each_piece_of_work_keeps_the_scope_it_was_given_in():
    with ThreadPoolExecutor(1) as pool:  # one thread, started inside the first rollout
        with hone.rollout("a"):
            assert pool.submit(here).result() == "a"
            assert list(pool.map(here, range(2))) == ["a", "a"]
        assert pool.submit(here).result() is None
        with hone.rollout("b"):
            inside = pool.submit(here)
        assert inside.result() == "b"


def test_work_given_outside_a_scope_has_none_although_another_is_open():
    opened, done = threading.Event(), threading.Event()

    def play() -> None:
        with hone.rollout("elsewhere"):
            opened.set()
            done.wait(10)

    with ThreadPoolExecutor(2) as pool:
        playing = pool.submit(play)
        assert opened.wait(10)
        assert pool.submit(here).result() is None
        done.set()
        playing.result()


def test_arguments_errors_and_the_class_itself_are_as_before():
    with hone.rollout(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert isinstance(pool.submit(lambda: 1 / 0).exception(), ZeroDivisionError)
        assert ThreadPoolExecutor.__dict__["submit"] is not SUBMIT
    assert ThreadPoolExecutor.__dict__["submit"] is SUBMIT


def test_somebody_else_s_patch_over_ours_survives(monkeypatch: Any):
    counted: list[Callable[..., Any]] = []
    with hone.rollout("r"):
        ours = ThreadPoolExecutor.submit

        def theirs(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            counted.append(fn)
            return ours(self, fn, *args, **kwargs)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", theirs)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(here).result() == "r"
    assert ThreadPoolExecutor.__dict__["submit"] is theirs
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(here).result() is None
    assert counted == [here, here]
