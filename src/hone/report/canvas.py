"""The common style of the plots: figures, axes, titles, legends.

In:   a size in inches; axes, titles, lines
Out:  matplotlib figures and their PNG bytes
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
"""In inches: for a screen, and for a phone."""
NARROW_BELOW = 7.0


def figure(size: tuple[float, float]) -> "Figure":
    # Matplotlib takes a second to load. Its own Figure, and not pyplot: this may run in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150 if size[0] > NARROW_BELOW else 200, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(axis: "Axes") -> None:
    axis.grid(axis="y", color=FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelcolor=INK, labelsize=9)
    axis.spines[:].set_visible(False)
    axis.spines["bottom"].set_visible(True)
    axis.spines["bottom"].set_color(FAINT)


def title(axis: "Axes", text: str, note: str, *, legend_rows: int = 0) -> None:
    """Two lines, the second wrapped if necessary, and below them space for the legend."""
    above = 12 + 17 * legend_rows
    # 10 letters of this size fit into an inch.
    inches = axis.figure.bbox.width / axis.figure.dpi
    for line in reversed(wrap(note, int(inches * 10))):
        axis.annotate(plain(line), **_above(above), fontsize=10, color=SOFT)
        above += 15
    above += 3
    axis.annotate(plain(text), **_above(above), fontsize=13, fontweight="bold", color=INK)


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
    """Put the legend above the plot, where no line crosses it; return its number of rows."""
    figure = axis.get_figure(root=True)
    assert figure is not None, "an axis without a figure"
    width = 0.88 * figure.get_window_extent().width
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
        if drawn.get_window_extent().width <= width:
            return math.ceil(len(handles) / columns)
    return len(handles)


def whole_numbers(axis: "Axes", most: int = 10) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def plain(text: str) -> str:
    """Escape dollar signs: matplotlib reads text between two of them as a formula."""
    return text.replace("$", r"\$")


def png(figure: "Figure", comment: str = "") -> bytes:
    """`comment` is in the file as plain text, and is not drawn."""
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, metadata={"Software": None, "Comment": comment}, facecolor="white")
    return picture.getvalue()
