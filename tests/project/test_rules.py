"""Rules of the house that a program can check."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 320
LONGEST_TEST = 600
"""Many small tests of one thing may stand together."""
SHORTEST_REASON = 10
# Put together here, so that this file does not hold what it looks for.
FORBIDDEN = [
    re.compile(pattern)
    for pattern in (
        "pypi" + r"\.org",
        "pythonhosted" + r"\.org",
        "npmjs" + r"\.(org|com)",
        r"/work/(main|shared|\.)",
        "not built" + " yet",
        r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b",
    )
]
BROAD = re.compile(r"#\s*noqa:\s*BLE001(?P<reason>.*)")


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository, as git knows them; a release without git has nothing to check here."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    found = [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]
    assert found
    return found


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in tracked(".py", ".sh")}
    long = [
        f"{path.relative_to(ROOT)}: {length} lines"
        for path, length in lengths.items()
        if length > (LONGEST_TEST if path.is_relative_to(ROOT / "tests") else LONGEST)
    ]
    assert long == []


def test_no_file_names_what_it_must_not() -> None:
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(text.splitlines(), 1):
            if any(pattern.search(line) for pattern in FORBIDDEN):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert wrong == []


def test_a_broad_except_gives_its_reason() -> None:
    """Ruff's BLE001 finds them, `make test` runs ruff, and this makes sure that it is not just silenced."""
    wrong = []
    for path in tracked(".py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            silenced = BROAD.search(line)
            if silenced and len(silenced["reason"].strip(" -:")) < SHORTEST_REASON:
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
    assert wrong == []


def test_modules_and_packages_say_what_they_are_for() -> None:
    empty = re.compile(r"\A\s*\Z")
    wrong = []
    for path in tracked(".py"):
        text = path.read_text(encoding="utf-8")
        if path.is_relative_to(ROOT / "src") and not text.startswith('"""') and not empty.match(text):
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []
