"""Write the results of a run: reward.png for people, result.json for scripts.

In:   the rows of the table; the held-out scores per tool, before and after training
Out:  two files
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: the loop also runs without a display

import matplotlib.pyplot as plt

INK, FAINT, WARM, COOL = "#22303c", "#c9d2d9", "#e2703a", "#1f7a8c"


def draw(
    rows: list[dict[str, Any]],
    before: dict[str, float],
    after: dict[str, float],
    unseen: str,
    out: Path,
) -> None:
    """Left: reward and exact answers per step. Right: held-out exact match per tool."""
    out.mkdir(parents=True, exist_ok=True)
    result = {"rows": rows, "before": before, "after": after}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), width_ratios=(3, 2), dpi=130)
    steps = [row["step"] for row in rows]
    reward, exact = [row["reward"] for row in rows], [row["exact"] for row in rows]
    left.fill_between(steps, reward, color=COOL, alpha=0.12, linewidth=0)
    left.plot(steps, reward, color=COOL, linewidth=2.5, marker="o", markersize=5, label="reward")
    left.plot(steps, exact, color=WARM, linewidth=1.8, linestyle=(0, (4, 2)), label="exact match")
    left.set(xlabel="step", ylim=(0, 1.03), xlim=(steps[0] - 0.3, steps[-1] + 0.3))
    left.set_title("training requests, sampled", loc="left", fontsize=12, pad=12)
    left.legend(frameon=False, loc="lower right")
    left.xaxis.get_major_locator().set_params(integer=True)

    tools = sorted(before, key=lambda tool: (tool == unseen, tool), reverse=True)
    for y, tool in enumerate(tools):
        right.plot([before[tool], after[tool]], [y, y], color=FAINT, linewidth=5, zorder=1)
        right.scatter(before[tool], y, s=70, color="white", edgecolor=INK, linewidth=1.4, zorder=2)
        right.scatter(after[tool], y, s=90, color=COOL if tool != unseen else WARM, zorder=3)
    names = [f"{tool}\n(never trained)" if tool == unseen else tool for tool in tools]
    right.set_yticks(range(len(tools)), names)
    right.set(xlim=(-0.04, 1.04), ylim=(-0.6, len(tools) - 0.4), xlabel="exact match")
    right.set_title(
        "held-out requests, greedy: before \u25cb  after \u25cf", loc="left", fontsize=12, pad=12
    )
    for axes in (left, right):
        axes.grid(color=FAINT, linewidth=0.6, alpha=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[:].set_visible(False)
    figure.tight_layout(w_pad=3)
    figure.savefig(out / "reward.png")
    plt.close(figure)
