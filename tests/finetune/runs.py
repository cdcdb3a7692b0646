"""Event logs of simulated runs, as the trainer would write them.

In:   a Story: its length, its rewards, its failures
Out:  the events in order; `tell` also writes them, and the rollouts of validations, into a directory
"""

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from hone.files.events import Event, parse

Line = dict[str, Any]

REST: dict[str, Line] = {
    "epoch_started": {"resumed": 0},
    "rollout": {
        "round": 0,
        "rollout": "r",
        "failure_reason": None,
        "seconds": 1.0,
        "calls": 1,
        "answered": True,
        "retried": [],
    },
    "epoch_collected": {
        "step": 0,
        "failure_reward": None,
        "curriculum_state": None,
        "curriculum": {},
    },
    "job_submitted": {"dropped": {}},
    "validation_started": {"resumed": 0, "final": False},
}
"""Fields that most tests do not care about, by the type of the event."""


@dataclass
class Story:
    """What happens."""

    epochs: int = 20
    planned: int | None = None
    examples: int = 48
    generations: int = 8
    held_out: int = 64
    """0: no validation data."""
    interval: int = 2
    skill: tuple[float, float] = (-1.6, 2.6)
    """Of the policy before and after; an example of difficulty d succeeds at sigmoid(skill - d)."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Rewards of failure and success."""
    held_out_scale: tuple[float, float] | None = None
    """The same for validations, where another evaluator measures them."""
    start_s: float = 9.0
    """From the command to run_started."""
    curriculum: bool = False
    failing: float = 0.01
    failed_validations: tuple[int, ...] = ()
    empty_epochs: tuple[int, ...] = ()
    killed_at: tuple[int, ...] = ()
    """The run dies in these epochs and is started again."""
    job_fails_at: int | None = None
    rounds: int = 1
    ends: bool = True
    seed: int = 0
    learning_rate: float = 5e-5
    more: dict[str, Any] = field(default_factory=dict)


STORIES = {
    "good": Story(),
    "curriculum": Story(epochs=22, curriculum=True, interval=5),
    "gaps": Story(epochs=16, failed_validations=(4, 6), empty_epochs=(9,), failing=0.12),
    "resumed": Story(epochs=14, killed_at=(4, 9)),
    "failed": Story(epochs=20, job_fails_at=6),
    "no_validation": Story(epochs=12, held_out=0),
    "one_epoch": Story(epochs=1, skill=(-0.5, 0.2)),
    "long": Story(epochs=200, interval=10, examples=16, generations=4, curriculum=True),
    "flat": Story(epochs=10, skill=(-3.5, -3.4), generations=2, learning_rate=1e-6),
    "worse": Story(epochs=8, skill=(1.0, -1.5), interval=1),
    "rounds": Story(epochs=5, rounds=4, interval=1),
    "signed": Story(epochs=12, scale=(-1.0, 1.0), interval=3),
    "few": Story(epochs=6, held_out=4, examples=4, interval=1),
    "apart": Story(
        epochs=14,
        scale=(-2.0, 3.0),
        held_out_scale=(0.0, 1.0),
        failed_validations=(4,),
        curriculum=True,
        more={
            "evaluator": "reward (agent.py:shaped)",
            "validation_evaluator": "reward (exact_match)",
        },
    ),
    "unfinished": Story(epochs=9, planned=20, ends=False),
}


def tell(story: Story, directory: Path) -> list[Line]:
    """Write events.jsonl and trajectories/validation_NNN.jsonl, as a run leaves them."""
    written = list(lines(story))
    (directory / "trajectories").mkdir(parents=True, exist_ok=True)
    with (directory / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in written)
    records: dict[str, list[str]] = {}
    for event in written:
        if event["type"] == "rollout":
            name = {"val": "validation", "train": "epoch"}.get(event["split"], "final")
            of_file = records.setdefault(f"{name}_{event['epoch']:03d}.jsonl", [])
            of_file.append(json.dumps(_record(event)) + "\n")
    for name, of_file in records.items():
        with (directory / "trajectories" / name).open("a") as file:
            file.writelines(of_file)
    return written


def events(story: Story) -> Iterator[Event]:
    return map(parse, lines(story))


def lines(story: Story) -> Iterator[Line]:
    """Events as the lines of events.jsonl have them."""
    return _Teller(story).run()


class _Teller:
    def __init__(self, story: Story) -> None:
        self.story, self.draw = story, random.Random(story.seed)
        self.at, self.began, self.session, self.step = 1_760_000_000.0, 0.0, 0, 0
        self.percentile = 0.3 if story.curriculum else 1.0
        self.validated: list[tuple[float, int, int]] = []
        self.trained: list[int] = []
        """Sizes of the groups of the newest job that have different rewards."""
        self.flat: list[int] = []
        self.lowest = min(0.0, *(story.held_out_scale or story.scale))
        total = max(story.examples, story.held_out)
        self.difficulty = [self.draw.gauss(0, 1.3) for _ in range(total)]

    def run(self) -> Iterator[Line]:
        story = self.story
        yield from self.start()
        for epoch in range(story.epochs):
            if epoch in story.killed_at:
                yield self.event("epoch_started", **self.position(epoch, 0), rollouts=0)
                yield from self.rollouts(epoch, 0, limit=20)
                self.at += 3600
                yield from self.start()
            if story.held_out and epoch % story.interval == 0:
                yield from self.validate(epoch)
            failed = yield from self.train(epoch)
            if failed:
                yield self.finish("failed", failed)
                return
        if story.held_out and story.ends:
            yield from self.validate(story.epochs)
            yield from self.compare()
        if story.ends:
            yield self.finish("completed", f"{story.epochs} of {story.epochs} epochs")

    def start(self) -> Iterator[Line]:
        story, self.session, self.began = self.story, self.session + 1, self.at
        self.at += story.start_s
        yield self.event(
            "run_started",
            run_id="art_run_0f3a9c1d",
            session=self.session,
            began=self.began,
            config_file="config.yml",
            command="hone finetune --config_file=config.yml",
            name="tool_caller",
            project="demo",
            base_model="smollm2-135m-instruct",
            step=self.step,
            epochs=story.planned or story.epochs,
            seed=story.seed,
            examples=story.examples,
            generations=story.generations,
            validation_examples=story.held_out,
            validation_interval=story.interval,
            learning_rate=story.learning_rate,
            output_dir=".demo",
            resumed=self.session > 1,
            **{"evaluator": "match", "root": ".demo/server"} | story.more,
        )
        yield self.event("preflight", checks=[{"name": "server", "ok": True, "message": "healthy"}])

    def train(self, epoch: int) -> Iterator[Line]:
        story, started, collected_at = self.story, self.at, self.at
        if story.curriculum and epoch and epoch % 5 == 0:
            self.percentile = min(1.0, self.percentile + 0.2)
        for round_ in range(story.rounds):
            place = self.position(epoch, round_)
            yield self.event("epoch_started", **place, rollouts=story.examples * story.generations)
            groups: dict[str, list[float]] = {}
            dropped: Counter[str] = Counter()
            for event in self.rollouts(epoch, round_):
                yield event
                if event["failure_kind"]:
                    dropped[f"{event['failure_kind']}/{event['failure_reason']}"] += 1
                elif epoch in story.empty_epochs:
                    dropped["no_calls"] += 1
                else:
                    groups.setdefault(event["example"], []).append(event["reward"])
            del place["rounds"], place["step"]
            collected = self.collected(epoch, groups) | {"dropped": dict(dropped)}
            yield self.event("epoch_collected", **place, **collected)
            collected_at = self.at
            if not groups:
                yield self.event("warning", message="No trajectories collected for epoch")
                continue
            sent = {"job": f"j-{epoch:04d}-{round_}", **place}
            submitted = collected["metrics"]["filtered_trajectories"]
            yield self.event("job_submitted", **sent, trajectories=submitted, groups=len(groups))
            if epoch == story.job_fails_at:
                why = "job 'j-0006-0' failed: loss is not finite at optimizer step 3"
                yield self.event("job_failed", **sent, message=why)
                return why
            self.at += self.draw.uniform(4, 7)
            self.step += 1
            yield self.event("job_done", **sent, **self.learned(epoch), seconds=self.at - started)
        phases = {"rollout_s": collected_at - started, "learn_s": self.at - collected_at}
        status = "skipped" if epoch in story.empty_epochs else "completed"
        yield self.event("epoch_done", epoch=epoch, status=status, phases=phases | _REST)
        return None

    def rollouts(self, epoch: int, round_: int, limit: int | None = None) -> Iterator[Line]:
        pairs = [(e, g) for e in range(self.story.examples) for g in range(self.story.generations)]
        for example, generation in pairs[:limit]:
            yield self.rollout("train", epoch, round_, example, generation)

    def rollout(self, split: str, epoch: int, round_: int, example: int, generation: int) -> Line:
        story = self.story
        self.at += self.draw.uniform(0.01, 0.06)
        kind = reason = reward = None
        if self.draw.random() < story.failing:
            kind, reason = self.draw.choice(_FAILURES)
        else:
            low, high = story.scale if split == "train" else story.held_out_scale or story.scale
            part = round_ / story.rounds if split == "train" else 0.0
            good = self.draw.random() < self.chance(split, epoch + part, example)
            partly = 0.3 * (high - low) if self.draw.random() < 0.2 else 0.0
            reward = high if good else low + partly
        return self.event(
            "rollout",
            split=split,
            epoch=epoch,
            round=round_,
            example=f"{'train' if split == 'train' else 'val'}-{example}",
            generation=generation,
            rollout=f"art_run_0f3a9c1d:{epoch}.{round_}.{example}.{generation}~{self.session}",
            reward=reward,
            failure_kind=kind,
            failure_reason=reason,
            seconds=1.5,
            calls=2,
            tokens=self.draw.randint(20, 90),
        )

    def chance(self, split: str, trained: float, example: int) -> float:
        story = self.story
        first, last = story.skill
        skill = first + (last - first) * (1 - math.exp(-3 * trained / max(story.epochs, 1)))
        behind = 0.0 if split == "train" else 0.4
        return 1 / (1 + math.exp(self.difficulty[example] + behind - skill))

    def collected(self, epoch: int, groups: dict[str, list[float]]) -> dict[str, Any]:
        rewards = [r for g in groups.values() for r in g]
        ranked = sorted(groups.values(), key=fmean, reverse=True)
        admitted = ranked[: max(1, math.ceil(len(ranked) * self.percentile))]
        used = [r for g in admitted for r in g]
        metrics: dict[str, Any] = {}
        for prefix, values in (("", rewards), ("filtered_", used)):
            metrics[f"{prefix}avg_reward"] = fmean(values) if values else None
            metrics[f"{prefix}min_reward"] = min(values, default=None)
            metrics[f"{prefix}max_reward"] = max(values, default=None)
            metrics[f"{prefix}trajectories" if prefix else "num_trajectories"] = len(values)
            metrics[f"{prefix}groups" if prefix else "num_groups"] = len(
                admitted if prefix else ranked
            )
        order = "avg_reward min_reward max_reward num_trajectories num_groups filtered_trajectories"
        order += " filtered_groups filtered_avg_reward filtered_min_reward filtered_max_reward"
        metrics = {key: metrics[key] for key in order.split()}
        metrics["curriculum_percentile"] = self.percentile
        state = {
            "current_percentile": self.percentile,
            "last_expansion_epoch": epoch // 5 * 5 if epoch >= 5 else -1,
            "total_groups": len(ranked),
            "included_groups": sorted(groups)[:3],
            "config": {"enabled": True},
        }
        flat = sum(min(g) == max(g) for g in ranked)
        self.trained = [len(g) for g in admitted if min(g) < max(g)] if groups else []
        self.flat = [len(g) for g in admitted if min(g) == max(g)] if groups else []
        return {
            "metrics": metrics,
            "zero_variance_groups": flat,
            "curriculum_state": state if self.story.curriculum else None,
        }

    def learned(self, epoch: int) -> dict[str, Any]:
        progress = epoch / max(self.story.epochs, 1)
        metrics = {
            "learn/labels": 5231.0,
            "learn/rollouts": float(sum(self.trained)),
            "learn/flat_rollouts": float(sum(self.flat)),
            "learn/long_rollouts": 0.0,
            "learn/learning_rate": self.story.learning_rate,
            "learn/loss": self.draw.gauss(0, 0.02),
            "learn/clip_frac": abs(self.draw.gauss(0.02, 0.01)),
            "learn/entropy": 0.9 * math.exp(-1.4 * progress) + self.draw.gauss(0, 0.02),
            "learn/grad_norm": 0.6 + 0.2 * self.draw.random(),
            "learn/mismatch_kl": abs(self.draw.gauss(4e-4, 1e-4)),
            "learn/optimizer_steps": 6.0,
            "learn/tokens_per_s": 2100 + 200 * self.draw.random(),
        }
        config = {"learning_rate": self.story.learning_rate, "loss": "grpo", "beta": 0.0}
        return {"step": self.step, "metrics": metrics, "counts": {}, "reason": "", "config": config}

    def compare(self) -> Iterator[Line]:
        """The first step and the best one, or the last if none is better, answer side by side."""
        if len(self.validated) < 2:
            return
        first, last = self.validated[0], self.validated[-1]
        best = max(self.validated, key=lambda entry: entry[0])
        pair = [entry[1:] for entry in (first, last if best == first else best)]
        round_, started, held_out = pair[1][1], self.at, self.story.held_out
        yield self.event("validation_started", epoch=round_, rollouts=2 * held_out, final=True)
        sides: list[list[Line]] = [[], []]
        for example in range(held_out):
            for side, (_, epoch) in enumerate(pair):
                sides[side].append(self.rollout("final", epoch, round_, example, 0))
                yield sides[side][-1]
        for (step, epoch), ended in zip(pair, sides, strict=True):
            where = {"epoch": epoch, "step": step, "round": round_}
            yield self.event("final_validation", **where, **self.measured(ended, started))

    def validate(self, epoch: int) -> Iterator[Line]:
        started, held_out = self.at, self.story.held_out
        yield self.event("validation_started", epoch=epoch, rollouts=held_out, final=False)
        ended = []
        for example in range(0 if epoch in self.story.failed_validations else held_out):
            ended.append(self.rollout("val", epoch, 0, example, 0))
            yield ended[-1]
        measured = self.measured(ended, started)
        if measured["avg_reward"] is not None:
            self.validated.append((measured["avg_reward"], self.step, epoch))
        yield self.event("validation", epoch=epoch, step=self.step, **measured)

    def measured(self, ended: list[Line], started: float) -> dict[str, Any]:
        """The fields of a validation's event."""
        rewards = {event["example"]: [event["reward"]] for event in ended}
        failed = {e["example"]: 1 for e in ended if e["failure_kind"] == "policy"}
        outside = [e["example"] for e in ended if e["failure_kind"] == "infrastructure"]
        known = [r for [r] in rewards.values() if r is not None]
        failures = len(rewards) - len(known)
        known += [min([self.lowest, *known])] * len(failed)
        return {
            "policy_failures": failed,
            "on_policy_failure": "drop",
            "unanswered": {example: [0] for example in outside},
            "avg_reward": fmean(known) if known else None,
            "min_reward": min(known, default=None),
            "max_reward": max(known, default=None),
            "num_examples": len(rewards),
            "failures": failures,
            "rewards": rewards,
            "error": None if known else "connection refused",
            "seconds": self.at - started,
        }

    def finish(self, status: str, message: str) -> Line:
        return self.event(
            "run_finished",
            status=status,
            message=message,
            step=self.step,
            best_step=max(self.validated, key=lambda entry: entry[0], default=(0.0, None, 0))[1],
            seconds=self.at - self.began,
        )

    def position(self, epoch: int, round_: int) -> dict[str, Any]:
        rounds = self.story.rounds
        return {"epoch": epoch, "round": round_, "rounds": rounds, "step": self.step}

    def event(self, type: str, **fields: Any) -> Line:
        self.at += 0.001
        return {"at": self.at, "type": type} | REST.get(type, {}) | fields


_REST = {"validate_s": 0.0, "other_s": 0.1}
_FAILURES = (
    ("infrastructure", "connection"),
    ("policy", "token_limit"),
    ("policy", "unparseable tool call"),
)


def _record(event: Line) -> dict[str, Any]:
    city = ("Paris", "Tokyo <b>& Osaka</b>", "Lima")[int(event["example"].split("-")[1]) % 3]
    ask = f"What is the weather in {city} tomorrow? ({event['example']})"
    good = event["reward"] == 1.0
    call = {"tool": "weather", "arguments": {"city": city, "day": "tomorrow" if good else None}}
    reply: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    failure = None
    if event["failure_kind"]:
        failure = {"kind": event["failure_kind"], "reason": event["failure_reason"], "type": "X"}
        failure |= {"message": "the server said no", "traceback": ""}
    return {
        **{k: event[k] for k in ("epoch", "round", "split", "example", "generation", "rollout")},
        **{k: event[k] for k in ("reward", "seconds", "calls", "tokens")},
        "scores": {"match": event["reward"]},
        "failure": failure,
        "output": None if failure else call,
        "input": ask,
        "shaped": [],
        "policy_steps": [0],
        "messages": [{"role": "user", "content": ask}, reply],
    }


if __name__ == "__main__":
    from hone.report import metrics, report
    from hone.report.history import RunHistory

    for name in sys.argv[2:] or STORIES:
        place = Path(sys.argv[1]) / name
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("trajectories/*"):
            old.unlink()
        history = RunHistory.of(map(parse, tell(STORIES[name], place)))
        metrics.write(place, history)
        report.write(place)
