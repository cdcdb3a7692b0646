"""Record the result of `make test-docs` in bench/results.json if all tests passed."""

import os
from time import monotonic

import pytest
from bench.report import record, result

STARTED = monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("HONE_DOCS") == "all" and exitstatus == 0:
        seconds = result("docs/time", [monotonic() - STARTED], "s")
        record([result("docs/tests", [session.testscollected], "tests"), seconds])
