"""One example, run twice before the first epoch: what no look at the configuration shows.

In:   the live parts of a run, its document
Out:  Checks: do the agent's calls reach the model, name their rollout, come back with tokens, and
      differ; does the evaluator score them; what they took

The two rollouts are in no journal and are not used for training.
"""

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.finetune import episodes
from hone.finetune.adapter import ARTTrainerAdapter
from hone.finetune.builder import NO_LOGPROBS, ARTTrajectoryBuilder
from hone.finetune.checks import Check, failures
from hone.finetune.unmarked import UNSEEN, Unmarked
from hone.types import RecordedCall

if TYPE_CHECKING:
    from hone.config.schema import Document
    from hone.evaluation.run import Evaluation, ItemResult

COINCIDENCE = 1e-3
"""Two rollouts that say the same are refused if the model would do so less often than this. So often
at the most is a good run refused by chance; answers of one or two tokens are only warned about."""

NOTHING = {
    "no_calls": "the server recorded no call of the rollout. See that the agent asks the model at "
    "{url} (its `llms` entry, or base_url) and does not answer from a cache. " + UNSEEN,
    "other_model": "its calls were answered by another model than {model}. Let the agent ask for "
    "{base!r} or {model!r}",
    "frozen": "its calls asked for a fixed step, as NAME@0, the base weights, and are not trained. Let the agent use "
    "the `llms` entry that is trained, or ask for {model!r}",
    "not_target_model": "none of its calls asked for finetuning.target_model {target!r}",
    "not_target_function": "no call came from finetuning.target_functions {functions}",
    "greedy": "its calls were sampled at temperature 0, so all rollouts of an example are the same "
    "and there is nothing to compare. Raise `temperature` in the `llms` entry",
    "abandoned": "the agent left before its answers were complete",
    "no_logprobs": NO_LOGPROBS,
}
"""Why nothing of a rollout could be trained, and what to do."""


class Twice:
    """Two rollouts of the first example, and what they tell."""

    def __init__(
        self,
        document: "Document",
        builder: ARTTrajectoryBuilder,
        adapter: ARTTrainerAdapter | None,
        evaluation: "Evaluation",
        run_id: str,
    ) -> None:
        self._document, self._builder, self._adapter = document, builder, adapter
        self._evaluation, self._item = evaluation, evaluation.items[0]
        draw = secrets.token_hex(6)
        self._run_id = run_id
        self._ids = [f"{run_id}:preflight.{draw}.{i}" for i in (0, 1)]
        reward = document.finetuning.reward_function
        assert reward is not None, "check_document came first"
        self._reward = reward.name

    async def checks(self) -> list[Check]:
        """In the order in which one depends on the other; stops at the first that fails."""
        unmarked = self._builder.unmarked
        before = Counter[str]() if unmarked is None else await unmarked.count(self._run_id)
        runs = await asyncio.gather(
            *(self._builder.run_item(self._item, id, self._reward) for id in self._ids)
        )
        found = [self._ran(runs)]
        if not failures(found):
            both = [
                await self._builder.found(id, () if run.rollout is None else run.rollout.calls)
                for id, run in zip(self._ids, runs, strict=True)
            ]
            found.append(self._calls([some for some, _ in both]))
            if unmarked is not None:
                found += _strangers(unmarked, await unmarked.count(self._run_id) - before)
            if not failures(found):
                found.append(self._differ([_said(some, calls) for some, calls in both]))
                found += self._valued(runs)
        found += [self._scored(runs), self._cost(runs)]
        return found

    def _ran(self, runs: "Sequence[ItemResult]") -> Check:
        name = "workflow"
        for run in runs:
            failure = None if run.rollout is None else run.rollout.failure
            if failure is not None and failure.kind == "infrastructure":
                said = failure.failure
                return Check(
                    name,
                    False,
                    f"the workflow failed on example {self._item.id!r} ({failure.reason}): "
                    f"{said.type}: {said.message}{_tail(said.traceback)}",
                )
        failed = [run.rollout.failure for run in runs if run.rollout and run.rollout.failure]
        if len(failed) == len(runs):
            said = failed[0].failure
            return Check(
                name,
                True,
                f"both rollouts of example {self._item.id!r} failed, as it seems by the model's own "
                f"doing ({failed[0].reason}): {said.type}: {said.message}{_tail(said.traceback)}",
                warning=True,
            )
        return Check(name, True, f"the workflow ran twice on example {self._item.id!r}")

    def _calls(self, both: Sequence[episodes.Found]) -> Check:
        name = "calls"
        for found in both:
            lost = found.dropped["unrecorded"]
            if lost:
                return Check(
                    name,
                    False,
                    f"{lost} calls of a rollout were answered by a hone server, but not recorded "
                    "under the rollout: they name no rollout, or another one. Let the agent leave "
                    "the header X-Hone-Rollout alone.",
                )
            if found.reason is not None:
                return Check(name, False, self._nothing(found.reason))
        counts = [len(found.sampled) for found in both]
        others = sum((found.dropped for found in both), start=type(both[0].dropped)())
        context = ", ".join(f"{n} {why}" for why, n in others.items())
        more = f"; not trained: {context}" if context else ""
        message = f"{counts[0]} and {counts[1]} calls of the two rollouts can be trained{more}"
        return Check(name, True, message)

    def _nothing(self, reason: str) -> str:
        adapter, config = self._adapter, self._document.finetuning
        known = {
            "url": adapter.served.base_url if adapter and adapter.served else "the server",
            "root": adapter.backend.base_url if adapter else "http://SERVER",
            "model": adapter.model_name if adapter else "the model in training",
            "base": adapter.adapter_config.backend.base_model if adapter else "",
            "target": config.target_model,
            "functions": config.target_functions,
        }
        why = NOTHING.get(reason, f"its calls cannot be trained ({reason})").format(**known)
        return (
            f"nothing of a rollout of example {self._item.id!r} could be trained: {why}. As it is, "
            "the run would end with 'No trajectories collected for epoch'."
        )

    def _differ(self, both: Sequence["_Said"]) -> Check:
        name = "sampling"
        if both[0].tokens != both[1].tokens:
            return Check(name, True, "two rollouts of one example differ")
        surprise = both[0].surprise
        chance = math.exp(min(0.0, surprise))
        message = f"two rollouts of example {self._item.id!r} are the same, token for token"
        if self._builder.comparison.baseline == "batch":
            message += "; training.baseline: batch still compares them with those of other examples"
            return Check(name, True, message, warning=True)
        if chance >= COINCIDENCE:
            message += (
                f"; the model does so with a probability of {chance:.2g}, so this may be chance"
            )
            return Check(name, True, message, warning=True)
        return Check(
            name,
            False,
            f"{message}, which is chance in {chance:.1e} of cases: groups of equal rollouts teach "
            "nothing. Raise `temperature` in the `llms` entry, remove top_k: 1, a small top_p or a "
            "cache.",
        )

    def _valued(self, runs: "Sequence[ItemResult]") -> list[Check]:
        """Whether the calls have the values that they are compared by."""
        credit = self._builder.comparison.credit
        steps = [step for run in runs if run.rollout for step in run.rollout.steps]
        if credit == "outcome":
            return []
        name, count = "credit", sum(step.value is not None for step in steps)
        if count:
            return [Check(name, True, f"calls are compared by {count} values of hone.step")]
        return [
            Check(
                name,
                False,
                f"training.credit is {credit!r}, which compares calls by the values of "
                f"hone.step(name, value=...), and two rollouts of example {self._item.id!r} noted "
                "none. Note them in the agent, or set training.credit: outcome.",
            )
        ]

    def _scored(self, runs: "Sequence[ItemResult]") -> Check:
        name, where = "score", f"evaluator {self._reward!r} on example {self._item.id!r}"
        scores = [run.scores[self._reward] for run in runs if self._reward in run.scores]
        failed = [score.failure for score in scores if score.failure is not None]
        if scores and len(failed) == len(scores):
            said = failed[0]
            return Check(
                name,
                False,
                f"{where} gives no score: {said.type}: {said.message}{_tail(said.traceback)}",
            )
        values = ", ".join(f"{s.value:g}" for s in scores if s.value is not None) or "none yet"
        return Check(name, True, f"{where}: {values}", warning=bool(failed) or not scores)

    def _cost(self, runs: "Sequence[ItemResult]") -> Check:
        ran = [run.rollout for run in runs if run.rollout is not None]
        calls = sum(len(one.calls) for one in ran)
        tokens = sum((c.usage or {}).get("completion_tokens", 0) for one in ran for c in one.calls)
        seconds = max((one.seconds for one in ran), default=0.0)
        return Check(
            "cost",
            True,
            f"the two rollouts took {calls} calls, {tokens} sampled tokens and {seconds:.1f} s; "
            "they are not used for training",
        )


class _Said(NamedTuple):
    """What of one rollout can be trained."""

    tokens: list[Any]
    """Of each call: ids, or the text of each token where the endpoint tells none."""
    surprise: float
    """The log-probability of all of it."""


def _said(found: episodes.Found, recorded: Sequence[RecordedCall]) -> _Said:
    if found.foreign:
        content = [one.logprobs["content"] for one in found.sampled]
        tokens = [[entry.get("token") for entry in entries] for entries in content]
        return _Said(tokens, sum(e.get("logprob") or 0.0 for entries in content for e in entries))
    ids = {one.id for one in found.sampled}
    calls = [one.call for one in recorded if one.id in ids]
    surprise = sum(sum(call.logprobs or ()) for call in calls)
    return _Said([call.completion_ids for call in calls], surprise)


def _strangers(unmarked: Unmarked, found: Counter[str]) -> list[Check]:
    """Calls of the agent that hone cannot see; of somebody else's it can only warn."""
    if not found:
        return []
    ok = not unmarked.of_trained(found)
    return [Check("unmarked calls", ok, unmarked.message(found), warning=ok)]


def _tail(traceback: str, lines: int = 4) -> str:
    tail = "\n".join(traceback.rstrip().splitlines()[-lines:])
    return f"\n{tail}" if tail else ""
