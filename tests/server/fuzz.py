"""test_fuzz.py with more cases than the test-suite has time for, and never the same ones.

In:   HONE_FUZZ_CASES (10,000), and whatever pytest takes
Out:  pytest's report; the exit code is 0 if nothing was found
Used: make fuzz
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ.setdefault("HONE_FUZZ_CASES", "10000")
    os.chdir(Path(__file__).parents[2])
    sys.exit(pytest.main(["-q", "tests/server/test_fuzz.py", *sys.argv[1:]]))
