"""docs/cases.md names only tests that exist, and a test for every case."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = [1, 2, 4, 5, 6, 7, 9, 10, 11, 13, 15, 16, 18, 19, 20, 22, 23, 24, 25, 26, 28, 29, 31, 32]
CASES += [34, 35, 37, 38, 40]
EXTRA = [1, 3, 4, 5, 8, 9]


def test_every_case_names_tests_that_exist() -> None:
    rows = {}
    for line in (ROOT / "docs/cases.md").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| ([BX]\d\d) \|", line):
            rows[found[1]] = re.findall(r"`(test/[\w/.]+)::(\w+)`", line)
    wanted = [f"B{number:02}" for number in CASES] + [f"X{number:02}" for number in EXTRA]
    assert list(rows) == wanted
    for case, tests in rows.items():
        assert tests, case
        for path, name in tests:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{case}: {path}::{name}"
