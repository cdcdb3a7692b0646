"""From the rollouts of a run to what was trained: how many, and why the others were not.

In:   the RunHistory of a run
Out:  a Funnel, whose numbers add up: collected = left out before a job + submitted, and submitted =
      without a gradient + trained; reasons in words

Infrastructure failures are left out. Failures of the model are trained, with the reward that
`finetuning.on_policy_failure` gives them, unless it is `drop`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from hone.files.events import JobDone, JobFailed
from hone.report.history import Round, RunHistory
from hone.report.text import counted, number

KINDS = {"infrastructure": "failed outside the model", "policy": "the model failed"}
FAILURES = {
    "agent_error": "the agent raised an exception",
    "connection": "a server could not be reached, or the connection was lost",
    "evaluator": "the evaluator raised an exception or gave no score",
    "exit_status": "the agent's program exited with an error",
    "http_status": "the agent's service answered with an error",
    "infrastructure_exceptions": "the agent raised an exception that infrastructure_exceptions lists",
    "killed": "the agent's program was killed",
    "model_name": "the agent asked for a model that its server does not have, or has in several projects",
    "no_output": "the agent returned no output",
    "not_started": "the agent's program could not be started",
    "output_too_large": "the agent returned more output than allowed",
    "policy": "the agent reported a failure of the model",
    "resources": "the machine ran out of memory, disk space or file descriptors",
    "server_error": "a server answered that it is overloaded or broken",
    "step_limit": "the agent reached its limit of steps",
    "timeout": "the rollout, or a request in it, took too long",
    "token_limit": "an answer or the conversation reached its limit of tokens",
    "unparseable": "the answer could not be parsed",
}
"""Reasons of failures; an agent may give reasons of its own."""
REASONS = {
    "abandoned": "the agent stopped reading the answer before its end, so it was not recorded whole",
    "curriculum": "the curriculum did not select the group",
    "empty_group": "no trajectory of the group could be sent",
    "equal_rewards": "all rewards of the group are equal, so there is nothing to compare",
    "frozen": "the call asked for a fixed step, such as NAME@0, or for the base model",
    "greedy": "the answer was sampled at temperature 0",
    "job_failed": "the training job failed",
    "job_running": "the training job has not ended",
    "message_order": "the messages are in an order that cannot be sent",
    "no_calls": "the rollout made no call that can be trained",
    "no_labels": "no token of the rollout can be trained",
    "no_logprobs": "the answer has no log-probabilities",
    "no_reward": "the rollout has no reward",
    "not_chat": "the call is not a chat completion",
    "not_submitted": "the run ended before the job was submitted",
    "not_target_function": "finetuning.target_functions does not name the function that made the call",
    "not_target_model": "finetuning.target_model does not name the model of the call",
    "other": "the trajectory builder gives no reason",
    "other_model": "another model answered",
    "small_group": "too few rollouts of the group are left to compare (finetuning.min_group_size)",
    "too_long": "a call is longer than training.max_seq_length",
    "unmarked": "the request named no rollout",
    "unrecorded": "the server has no record of the call",
}
"""Why something that did not fail was not trained."""


def explain(reason: str) -> str:
    """A reason with its meaning; one that a plugin gives is shown as it is."""
    kind, slash, rest = reason.partition("/")
    if slash and kind in KINDS:
        return f"{KINDS[kind]}: {_meaning(rest)}"
    name = reason.removeprefix("call/")
    known = REASONS.get(name)
    return f"{name}: {known}" if known else name


def _meaning(reason: str) -> str:
    """The reason of a failure with its meaning."""
    known = FAILURES.get(reason)
    return reason + (f" ({known})" if known else "")


@dataclass(slots=True)
class Funnel:
    """Counts of training rollouts, or of conversations of a dataset."""

    noun: str = "training rollout"
    collected: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Left out before a job, by reason; `KIND/REASON` for failures."""
    submitted: int = 0
    no_gradient: Counter[str] = field(default_factory=Counter)
    """Submitted, but not trained, by reason."""
    trained: int = 0
    is_known: bool = True
    """Whether every job counted what it trained; the backend of a plugin may not."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that were not trained, by reason; their rollouts may be."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures of the model that got a reward, by reason."""
    failure_rewards: dict[str, list[float]] = field(default_factory=dict)
    """Lowest and highest reward of these."""

    @classmethod
    def of(cls, history: RunHistory) -> Self:
        funnel = cls("conversation" if history.run.generations == 0 else "training rollout")
        for r in history.rounds:
            funnel._train(r, funnel._collect(r))
            funnel._add_failures(r)
        return funnel

    def _collect(self, r: Round) -> int:
        """Count what was left out before the job; returns what was submitted."""
        grouped = r.metrics.get("num_trajectories") or 0
        dropped = Counter(r.collected.dropped if r.collected else {})
        left_out = Counter({why: n for why, n in dropped.items() if not why.startswith("call/")})
        self.calls.update({why: n for why, n in dropped.items() if why.startswith("call/")})
        rollouts = len(r.rewards.keys() | r.failures.keys())
        left_out["other"] += max(0, rollouts - grouped - left_out.total())
        self.collected += grouped + left_out.total()
        sent = r.metrics.get("filtered_trajectories", grouped) or 0
        left_out["curriculum"] = grouped - sent
        if r.submitted is None:
            left_out["not_submitted"], sent = sent, 0
        else:
            unsent = r.submitted.dropped.get("message_order", 0)
            left_out["message_order"], sent = unsent, sent - unsent
        self.left_out.update(+left_out)
        self.submitted += sent
        return sent

    def _train(self, r: Round, sent: int) -> None:
        if r.submitted is None:
            return
        if not isinstance(r.job, JobDone):
            failed = isinstance(r.job, JobFailed)
            self.no_gradient["job_failed" if failed else "job_running"] += sent
            return
        if "learn/rollouts" not in r.learned:
            self.is_known = False
            return
        lost = Counter(
            equal_rewards=int(r.learned.get("learn/flat_rollouts", 0)),
            too_long=int(r.learned.get("learn/long_rollouts", 0)),
            no_calls=int((r.job.counts or {}).get("dropped/no_calls", 0)),
        )
        trained = min(int(r.learned["learn/rollouts"]), sent)
        lost["no_labels"] = max(0, sent - trained - lost.total())
        self.no_gradient.update(+lost)
        self.trained += trained

    def _add_failures(self, r: Round) -> None:
        """Failures of the model in this round, without those that were dropped."""
        if r.collected is None or (reward := r.collected.failure_reward) is None:
            return  # none is trained
        dropped = Counter(r.collected.dropped)
        reasons = Counter(
            reason
            for kind, _, reason in (why.partition(": ") for why in r.failures.values())
            if kind == "policy"
        )
        for reason, n in reasons.items():
            if (trained := n - dropped[f"policy/{reason}"]) > 0:
                self.failures[reason] += trained
                known = [*self.failure_rewards.get(reason, ()), reward]
                self.failure_rewards[reason] = [min(known), max(known)]

    # ---- as text --------------------------------------------------------------------------

    @property
    def sentence(self) -> str:
        """How many were collected, left out, submitted, without a gradient, and trained."""
        parts = (
            f"{counted(self.collected, self.noun)}: {self.left_out.total():,} left out "
            f"before a job, {self.submitted:,} submitted"
        )
        if not self.is_known:
            return f"{parts}."
        return (
            f"{parts}. Of those submitted, {self.no_gradient.total():,} gave no gradient and "
            f"{self.trained:,} were trained."
        )

    @property
    def left_out_rows(self) -> list[tuple[str, str, str, str]]:
        """Reason, when, number and share of what was not trained; calls at the end."""
        stages = ("before the job", self.left_out), ("in the job", self.no_gradient)
        return [
            *(
                (explain(why), when, f"{n:,}", f"{n / self.collected:.1%}")
                for when, reasons in stages
                for why, n in reasons.most_common()
            ),
            *((explain(why), "", counted(n, "call"), "") for why, n in self.calls.most_common()),
        ]

    @property
    def failure_rows(self) -> list[tuple[str, str, str]]:
        """Reason, number and reward of failures of the model that got a reward."""
        rows = []
        for reason, n in self.failures.most_common():
            low, high = self.failure_rewards[reason]
            reward = number(low) if low == high else f"{number(low)} to {number(high)}"
            rows.append((explain(f"policy/{reason}"), f"{n:,}", reward))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """`training_data` of report.json."""
        return {
            "collected": self.collected,
            "left_out": dict(self.left_out),
            "submitted": self.submitted,
            "no_gradient": dict(self.no_gradient),
            "trained": self.trained if self.is_known else None,
            "calls_not_trained": dict(self.calls),
            "trained_failures": {
                reason: {"number": n, "rewards": self.failure_rewards[reason]}
                for reason, n in self.failures.items()
            },
        }


def failed_rows(r: Round | None) -> list[tuple[str, str, str]]:
    """Reason, number and share of the failures in a round that ended the run."""
    if r is None:
        return []
    reasons = Counter(why.partition(": ")[2] for why in r.failures.values())
    total = len(r.ended)
    return [
        (_meaning(reason), f"{n:,} of {total:,}", f"{n / total:.1%}")
        for reason, n in reasons.most_common()
    ]


def retried_rows(history: RunHistory) -> list[tuple[str, str, str]]:
    """Reason of attempts that failed and were run again; how many in training and in validations."""
    training, held_out = history.retried, history.validation_retried
    reasons = (training + held_out).most_common()
    return [
        (explain(why.replace(": ", "/", 1)), f"{training[why]:,}", f"{held_out[why]:,}")
        for why, _ in reasons
    ]
