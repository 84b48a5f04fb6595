"""The cluster's secret: made, kept, typed and mistyped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.cluster.bus.secret import WORDS, cluster_secret, keep_secret, new_secret, read_secret
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.kv.tls import Authority

KNOWN = "vacuum foam paper drill zero material juice enter craft victory valve carpet"


def test_new_secrets_are_words_that_read_back() -> None:
    made = {new_secret() for _ in range(200)}
    assert len(made) == 200
    for secret in made:
        assert len(secret.split()) == WORDS
        assert read_secret(secret) == secret
    assert Authority(made.pop())


@pytest.mark.parametrize("text", [KNOWN.upper(), KNOWN.replace(" ", "-"), f"\n {KNOWN.replace(' ', '   ')}\n"])
def test_how_people_write_words(text: str) -> None:
    assert read_secret(text) == KNOWN


def test_other_secrets_are_taken_as_they_are() -> None:
    for text in ("a secret of sixteen", "f3a9" * 16, "Correct-Horse-Battery-Staple!"):
        assert read_secret(f"{text}\n") == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (KNOWN.replace("drill", "dril"), r"Word 4 .*'dril'.*drill"),
        (KNOWN.replace("vacuum foam", "foam vacuum"), "words 1 and 2 changed places"),
        (KNOWN.replace("juice", "joy"), "do not belong together"),
        (KNOWN.removesuffix(" carpet"), "has 12 words; these are 11"),
        (f"{KNOWN} zoo", "has 12 words; these are 13"),
        ("  ", "is empty"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_secret(text)


def test_a_word_that_looks_like_another_is_found() -> None:
    """Both are in the list, so that only the checksum can tell."""
    words = KNOWN.split()
    words[5] = "matrix"
    with pytest.raises(ConfigError, match="word 6 is 'material'"):
        read_secret(" ".join(words))


def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = Settings(home=home, cluster_secret="")
    assert cluster_secret(settings) == ""
    path = keep_secret(home, KNOWN.upper())
    assert path.stat().st_mode & 0o777 == 0o600
    assert cluster_secret(settings) == KNOWN
    assert cluster_secret(Settings(home=home, cluster_secret="another secret wins")) == "another secret wins"
    keep_secret(home, "replaced by this one")
    assert cluster_secret(settings) == "replaced by this one"
    assert [entry.name for entry in home.iterdir()] == ["cluster_secret"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        cluster_secret(settings)


def test_what_cannot_be_kept_or_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept"):
        keep_secret(tmp_path / "file", KNOWN)
    (tmp_path / "cluster_secret").write_bytes(b"\xff" * 20)
    os.chmod(tmp_path / "cluster_secret", 0o600)
    with pytest.raises(ConfigError, match="cannot be read"):
        cluster_secret(Settings(home=tmp_path, cluster_secret=""))
