"""`python -m bench.curves`: examples with several seeds on one server, and plots of their rewards.

In:   a running server (`hone serve`), an example, seeds; or, for `plot`, gpu.json
Out:  one JSON object per seed, as soon as its run ends; docs/images/EXAMPLE_vllm.png

    python -m bench.curves run --url http://127.0.0.1:7623 --example 02_tool_calls --seeds 0 1 2 3 4 5
    python -m bench.curves plot

The runs use the example's config.yml and run at the same time; each trains a model of its own.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bench.process import ROOT
from bench.seeds import finetune_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = ROOT / "bench" / "gpu.json"
IMAGES = ROOT / "docs" / "images"
WHAT = "example on one server"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.curves")
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="train with every seed, all at once")
    run.add_argument("--url", required=True, help="of a hone server")
    run.add_argument("--example", default="02_tool_calls")
    run.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    run.add_argument(
        "-o", dest="overrides", nargs=2, action="append", default=[], metavar=("KEY", "VALUE")
    )
    plot = commands.add_parser("plot", help="draw the runs that gpu.json has")
    plot.add_argument("--records", type=Path, default=RECORDS)
    plot.add_argument("--into", type=Path, default=IMAGES)
    options = parser.parse_args(arguments)
    if options.command == "plot":
        for example, runs in recorded(options.records).items():
            picture(example, runs).savefig(options.into / f"{example}_vllm.png")
        return 0
    with ThreadPoolExecutor(len(options.seeds)) as pool:
        done = list(pool.map(partial(_run, options), options.seeds))
    return 0 if all(done) else 1


def _run(options: argparse.Namespace, seed: int) -> bool:
    """One run as the example's README starts it; prints its rewards, or why it failed."""
    example, server = ROOT / "examples" / options.example, urlsplit(options.url)
    backend, began = "trainer_adapters.server.backend", monotonic()
    with TemporaryDirectory(prefix="hone-curves-") as directory:
        settings = [
            ("finetuning.seed", seed),
            ("finetuning.output_dir", directory),
            (f"{backend}.ip", server.hostname),
            (f"{backend}.port", server.port),
            (f"{backend}.name", f"{options.example}-{seed}"),
            *options.overrides,
        ]
        command = finetune_command(example, settings)
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            print(f"seed {seed}: {run.stdout[-2000:]}\n{run.stderr[-2000:]}", file=sys.stderr)
            return False
        history = json.loads((Path(directory) / "reward_history.json").read_text())
        report = json.loads((Path(directory) / "report.json").read_text())
    line = {
        "what": WHAT,
        "example": options.example,
        "seed": seed,
        "before": round(report["baseline"]["mean"], 4),
        "after": round(report["tuned"]["mean"], 4),
        "rewards": [epoch["avg_reward"] for epoch in history],
        "seconds": round(monotonic() - began, 1),
    }
    print(json.dumps(line), flush=True)
    return True


def recorded(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The newest recorded runs of every example, by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        lines = [line for line in run["measured"] if line.get("what") == WHAT]
        for example in {line["example"] for line in lines}:
            runs = [line for line in lines if line["example"] == example]
            found[example] = sorted(runs, key=lambda line: line["seed"])
    return found


def picture(example: str, runs: Sequence[dict[str, Any]]) -> "Figure":
    """Training reward by epoch, a line per seed and their mean; held-out reward before and after."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from hone.report.plots import COOL, FAINT, INK, SOFT, WARM

    with style.context("default"):
        figure = Figure(figsize=(8.0, 4.2), dpi=150, layout="constrained")
        training, held_out = figure.subplots(1, 2, width_ratios=(3, 1))
        for run in runs:
            training.plot(range(len(run["rewards"])), run["rewards"], color=FAINT, linewidth=1.2)
            held_out.plot((0, 1), (run["before"], run["after"]), color=FAINT, marker="o")
        epochs = zip(*(run["rewards"] for run in runs), strict=True)
        means = [fmean(rewards) for rewards in epochs]
        training.plot(range(len(means)), means, color=COOL, linewidth=2.4)
        ends = [fmean(run[when] for run in runs) for when in ("before", "after")]
        held_out.plot((0, 1), ends, color=WARM, linewidth=2.4, marker="o")
        for place, offset, align in ((0, -9, "right"), (1, 9, "left")):
            text, at = f"{ends[place]:.2f}", (place, ends[place])
            held_out.annotate(text, at, (offset, -4), textcoords="offset points", ha=align)
        training.set_title(f"training reward, {len(runs)} seeds and their mean", color=INK)
        training.set_xlabel("epochs trained", color=SOFT)
        training.xaxis.set_major_locator(MaxNLocator(integer=True))
        held_out.set_title("held-out reward", color=INK)
        held_out.set_xticks((0, 1), ("before", "after"))
        held_out.set_xlim(-0.7, 1.7)
        for axis in (training, held_out):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(colors=SOFT)
            axis.margins(y=0.12)
        figure.suptitle(f"{example}, vLLM on one H200", color=INK)
        return figure


if __name__ == "__main__":
    sys.exit(main())
