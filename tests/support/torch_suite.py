"""``torch_suite.py OUT MODE [TEST...]``: runs torch's own ``distributed_test.py`` over Gloo.

Each test's ranks are forked from this process, which has imported torch already. That saves most of
the time that torch's own runner takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path

#: As torch's own runner sets them for Gloo.
ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "3",
    "INIT_METHOD": "file://",
    "TEMP_DIR": tempfile.mkdtemp(),
}
OK, SKIPPED, FAILED = "ok", "skipped: ", "failed"


class Outcomes(unittest.TestResult):
    """What became of each test; written to ``out`` after each."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.of: dict[str, str] = {}

    def _keep(self, test: unittest.TestCase, outcome: str) -> None:
        self.of.setdefault(test._testMethodName, outcome)
        self.out.write_text(json.dumps(self.of, indent=1))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._keep(test, OK)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._keep(test, SKIPPED + reason)

    def addError(self, test: unittest.TestCase, err: object) -> None:
        # The text names whichever rank failed first; it is in this process's output.
        self._keep(test, FAILED)

    addFailure = addError


def main() -> None:
    out, mode, *names = sys.argv[1:]
    os.environ.update(ENVIRONMENT)
    for folder in ("barrier", "test_dir"):
        Path(ENVIRONMENT["TEMP_DIR"], folder).mkdir()
    import torch

    torch.set_num_threads(1)
    if mode == "crux":
        import crux_torch

        crux_torch.attach()
    # torch.testing derives its test cases from this package's, which nothing here needs.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import distributed_test

    class TestOverGloo(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    names = names or unittest.defaultTestLoader.getTestCaseNames(TestOverGloo)  # type: ignore[assignment]
    outcomes = Outcomes(Path(out))
    for name in names:
        TestOverGloo(name).run(outcomes)


if __name__ == "__main__":
    main()
