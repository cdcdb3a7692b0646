"""test_fuzz.py with more cases than the test-suite has time for, and never the same ones.

In:   HONE_FUZZ_CASES (10,000), HONE_FUZZ_DEADLINE_S (an hour), and whatever pytest takes
Out:  pytest's report and the time it took; the exit code is 0 if nothing was found in time
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.report import record, result

if __name__ == "__main__":
    cases = os.environ.setdefault("HONE_FUZZ_CASES", "10000")
    deadline_s = float(os.environ.get("HONE_FUZZ_DEADLINE_S", "3600"))
    command = [sys.executable, "-m", "pytest", "-q", "tests/server/test_fuzz.py", *sys.argv[1:]]
    began = time.monotonic()
    try:
        code = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=deadline_s).returncode
    except subprocess.TimeoutExpired:
        code = f"fuzz: not done after {deadline_s:g} s (HONE_FUZZ_DEADLINE_S)"
    seconds = time.monotonic() - began
    print(f"fuzz: {cases} cases in {seconds:.0f} s")  # noqa: T201  # a program
    if code == 0 and int(cases) >= 10_000:
        record([result("fuzz/cases", [int(cases)], "cases"), result("fuzz/time", [seconds], "s")])
    sys.exit(code)
