"""The documentation says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer.main

from tandem.cli.main import app
from tandem.config import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)[^)]*\)")
SOURCE_PATH = re.compile(r"`((?:src|scripts|tests)/[\w./-]+)`")


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "write_docs.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        assert f"`TANDEM_{name.upper()}`" in page
        assert field.description
        assert " ".join(field.description.split()) in page


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = {part.split("`")[1]: part for part in page.split("\n### ")[1:]}
    walked = 0
    pending = [("tandem", typer.main.get_command(app))]
    while pending:
        path, command = pending.pop()
        context = typer.Context(command)
        names = command.list_commands(context) if hasattr(command, "list_commands") else []
        if names:
            pending += [(f"{path} {name}", command.get_command(context, name)) for name in names]
            continue
        walked += 1
        for parameter in command.params:
            for spelling in parameter.opts if parameter.param_type_name == "option" else ():
                assert f"`{spelling}`" in sections[path], f"{path} {spelling}"
    assert walked == len(sections)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    for target in SOURCE_PATH.findall(text):
        assert (ROOT / target).exists(), target


def test_every_page_is_reachable_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "tandem").glob("*/__init__.py")}
    assert packages
    for package in packages:
        assert f"`{package}`" in page


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"^make (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_the_changelog_knows_this_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_pictures_are_well_formed_and_described() -> None:
    pictures = list((ROOT / "docs").glob("*.svg"))
    assert pictures
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
