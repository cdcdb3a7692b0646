"""How pictures of a run look: their paper, axes, titles and legends.

In:   a size in inches; axes, titles, lines
Out:  figures dressed alike, and their PNG bytes
"""

import io
import math
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, FAINT = "#22303c", "#66727c", "#d5dce1"
WIDE, NARROW = (10.0, 5.2), (4.6, 4.4)
"""Inches: for a screen, and for a phone."""
NARROW_BELOW = 7.0


def figure(size: tuple[float, float]) -> "Figure":
    # Matplotlib takes a second to load. Its own Figure, and not pyplot: this may run in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, dpi=150 if size[0] > NARROW_BELOW else 200, facecolor="white")
    FigureCanvasAgg(made)
    return made


def one_axis(size: tuple[float, float]) -> tuple["Figure", "Axes"]:
    made = figure(size)
    axis = made.add_subplot()
    dress(axis)
    return made, axis


def dress(axis: "Axes") -> None:
    axis.grid(axis="y", color=FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelcolor=INK, labelsize=9)
    axis.spines[:].set_visible(False)
    axis.spines["bottom"].set_visible(True)
    axis.spines["bottom"].set_color(FAINT)


def title(axis: "Axes", said: str, note: str, *, legend_rows: int = 0) -> None:
    """Two lines, the second wrapped if need be, and below them room for the legend."""
    above = 12 + 17 * legend_rows
    # 10 letters of this size fit into an inch.
    inches = axis.figure.bbox.width / axis.figure.dpi
    for line in reversed(wrap(note, int(inches * 10))):
        axis.annotate(plain(line), **_above(above), fontsize=10, color=SOFT)
        above += 15
    above += 3
    axis.annotate(plain(said), **_above(above), fontsize=13, fontweight="bold", color=INK)


def _above(points: float) -> dict[str, Any]:
    return {
        "xy": (0.0, 1.0),
        "xycoords": "axes fraction",
        "xytext": (0.0, points),
        "textcoords": "offset points",
        "va": "bottom",
        "annotation_clip": False,
    }


def legend(axis: "Axes", handles: list[Any]) -> int:
    """Above the plot, where no line can run into it; how many rows it takes."""
    whole = axis.get_figure(root=True)
    assert whole is not None, "an axis without a figure"
    room = 0.88 * whole.get_window_extent().width
    for columns in range(len(handles), 0, -1):
        drawn = axis.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderaxespad=0.4,
            borderpad=0.0,
            ncols=columns,
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
            handlelength=2.2,
            columnspacing=1.6,
            labelspacing=0.35,
        )
        if drawn.get_window_extent().width <= room:
            return math.ceil(len(handles) / columns)
    return len(handles)


def whole_numbers(axis: "Axes", most: int = 10) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def plain(text: str) -> str:
    """As it is: matplotlib takes what stands between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def png(made: "Figure", comment: str = "") -> bytes:
    """`comment` stands in the file as plain text, and is not drawn."""
    made.tight_layout()
    picture = io.BytesIO()
    made.savefig(picture, metadata={"Software": None, "Comment": comment}, facecolor="white")
    return picture.getvalue()
