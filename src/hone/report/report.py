"""The report of a run: report.json, report.md, report.html and reward_plot.png.

In:   a run's output_dir
Out:  the four files; sections.py says what is in them
"""

import json
from pathlib import Path

from hone.report import page, plots
from hone.report.metrics import replace
from hone.report.outcome import Outcome, measure
from hone.report.sections import sections


def write(output_dir: Path, *, brief: bool = False) -> Outcome:
    """Write the files from what is known now.

    `brief` draws nothing, because somebody waits for the command to end: the report shows the reward
    plot if it is up to date, and leaves out the other pictures.
    """
    output_dir = Path(output_dir)
    outcome, file = measure(output_dir), output_dir / "reward_plot.png"
    picture = file.read_bytes() if file.exists() else None
    if picture is not None and not plots.shows_all(picture, outcome.history):
        picture = None
    if picture is None and not brief:
        picture = plots.rewards(outcome.history, plots.WIDE)
        replace(file, picture)
    document = sections(outcome, picture, brief=brief)
    replace(output_dir / "report.json", json.dumps(outcome.as_dict(), indent=2) + "\n")
    replace(output_dir / "report.md", page.markdown(document))
    replace(output_dir / "report.html", page.html(document))
    return outcome
