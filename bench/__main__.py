"""`python -m bench`: measure hone beside its peers, print a table, write results.json.

In:   which benchmarks, how many repeats
Out:  a table on stdout, progress on stderr, bench/results.json; exit code 1 if something could not
      be measured

Results of benchmarks that were not run again stay in the file; each says on which machine it was
measured.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from bench import cache, harness, loop, memory, publish, rollout, serve, train
from bench.process import ROOT, ContenderFailed
from bench.report import RESULTS, Result, markdown_table, read, record, terminal_table
from bench.setting import MODEL, Setting, prepared

BENCHMARKS: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "rollout": rollout.run,
    "train": train.run,
    "publish": publish.run,
    "memory": memory.run,
    "serve": serve.run,
    "harness": harness.run,
    "loop": loop.run,
    "cache": cache.run,
}
QUICK_RESULTS = ROOT / "bench" / "results-quick.json"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    out: Path = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    if options.table:
        print(markdown_table(read(out)))
        return 0
    # So that children are ended also when this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: list[Result] = []
    failed: list[str] = []
    repeats = options.repeats or (1 if options.quick else 5)
    without = frozenset(options.without)
    sizes = {"repeats": repeats, "quick": options.quick, "model": options.model}
    with prepared(without=without, **sizes) as setting:
        for name in options.names or BENCHMARKS:
            setting.say(f"{name}: begins")
            try:
                fresh = list(BENCHMARKS[name](setting))
            except ContenderFailed as error:
                setting.say(f"{name}: failed: {error}")
                failed.append(name)
                continue
            results += fresh
            record(fresh, out)
            unmeasured = [r.name for r in fresh if r.peer and r.peer_value is None]
            failed += [n for n in unmeasured if not _left_out(n, without)]
    title = (
        "quick run: these numbers mean nothing" if options.quick else f"{repeats} repeats, medians"
    )
    Console(width=None if sys.stdout.isatty() else 160).print(terminal_table(results, title=title))
    print(f"written to {out}")
    if failed:
        print(f"not measured: {', '.join(failed)}; the reasons are above", file=sys.stderr)
    return 1 if failed else 0


def _left_out(name: str, without: frozenset[str]) -> bool:
    peer = name.split("/")[1]
    return peer in without or peer.split("-")[0] in without


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="hone beside its peers")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default all"
    )
    parser.add_argument("--repeats", type=int, help="measured rounds (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and one round, to see that all of it runs"
    )
    parser.add_argument("--model", default=MODEL, help=f"name or directory (default {MODEL})")
    parser.add_argument("--out", type=Path, help="default bench/results.json")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PEER",
        help="leave a peer out: transformers, vllm, peft, trl, nat",
    )
    parser.add_argument(
        "--table", action="store_true", help="print the results there are, as Markdown"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
