"""Calls that reached the model's server while rollouts ran, and named none of them.

In:   what the server counted of each model, before and after
Out:  how many there were, and what to say of them

An agent may make some of its calls in a way that hone cannot see: they are missing from the
trajectory, and by the base model's name they get the untrained model. Only the server knows of
them. Evaluators ask the same server rightly, so their calls say whose they are (`EVALUATION`).
"""

import logging
from collections import Counter
from typing import Protocol

from hone.errors import HoneError

logger = logging.getLogger("hone")

EVALUATION = "<evaluation>"
"""The function that calls of evaluators name."""
UNSEEN = (
    "An agent's calls are seen if its HTTP client is httpx or httpx2, as that of openai is, and if "
    "a thread it starts gets the context (contextvars.copy_context().run; thread pools have it); any "
    "other client, and an agent in a process of its own, must use the base URL "
    "{root}/rollout/ROLLOUT_ID/v1, which is `llm.rollout_url`"
)


class Server(Protocol):
    """Who knows; a RemoteBackend is one."""

    base_url: str

    async def unmarked(self, run_id: str) -> dict[str, int]:
        """Requests to the run's models that named no rollout so far, by model."""
        ...


class Unmarked:
    """What one server knows of such calls."""

    def __init__(self, server: Server, model: str) -> None:
        """`model`: PROJECT/NAME in training."""
        self._server, self._model = server, model
        self._is_told = False

    async def count(self, run_id: str) -> Counter[str]:
        """Requests so far, by model; none where the server cannot be asked."""
        try:
            return Counter(await self._server.unmarked(run_id))
        except HoneError as error:
            logger.warning("Calls without a rollout were not counted: %s", error)
            return Counter()

    def of_trained(self, found: Counter[str]) -> int:
        """How many of them the model in training answered: hardly anybody else asks for that."""
        return found[self._model]

    def message(self, found: Counter[str]) -> str:
        """What to say of calls that named no rollout."""
        counts = ", ".join(f"{name}: {n}" for name, n in found.items())
        base = [name for name in found if name != self._model]
        stale = f" Outside a rollout {base[0]!r} is the untrained model." if base else ""
        return (
            f"{found.total()} calls named no rollout while rollouts ran ({counts}), and are not "
            f"trained.{stale} {UNSEEN.format(root=self._server.base_url)}. If somebody else used the server, "
            "nothing is wrong."
        )

    def first_message(self, found: Counter[str]) -> str | None:
        """The same, once; then only the counts go on."""
        if not found or self._is_told:
            return None
        self._is_told = True
        return self.message(found)
