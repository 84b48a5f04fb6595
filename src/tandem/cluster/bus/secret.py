"""The cluster's secret: where it comes from, and how people carry it from one machine to the next.

A secret that is made here is twelve words of the BIP39 English list: 112 random bits and 20 bits of checksum, so that
a wrong word is noticed before a node wonders why nobody lets it in. Any other text of 16 characters and more is a
secret too, taken as it is.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from functools import lru_cache
from pathlib import Path

from tandem.config import Settings
from tandem.errors import ConfigError

WORDS = 12
_BITS = 11
"""Per word: the list has 2048."""
_CHECK_BITS = 20
_RANDOM_BYTES = (WORDS * _BITS - _CHECK_BITS) // 8
_MEANT_AS_WORDS = 8
"""A text with as many listed words is one of ours, if perhaps with a mistake."""
FILE = "cluster_secret"


def cluster_secret(settings: Settings) -> str:
    """The secret in its normal form: from the setting, else from the data folder; empty if there is none.

    Raises:
        ConfigError: the file cannot be read or is open to others, or the words have a mistake.
    """
    if settings.cluster_secret:
        return read_secret(settings.cluster_secret)
    path = settings.home / FILE
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            text = file.read(4096)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The cluster secret in {path} cannot be read: {error}.") from error
    if mode & 0o077:
        raise ConfigError(f"Others can read the cluster secret (mode {mode:03o}). Run: chmod 600 {path}")
    return read_secret(text)


def keep_secret(home: Path, secret: str) -> Path:
    """Write `secret` to the data folder, readable by its owner alone, in place of an earlier one.

    Raises:
        ConfigError: the words have a mistake, or the folder cannot be written.
    """
    text = read_secret(secret)
    path = home / FILE
    temporary = home / f".{FILE}.{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"The cluster secret cannot be kept in {path}: {error}.") from error
    return path


def new_secret() -> str:
    """Twelve words, separated by spaces."""
    return _words(secrets.token_bytes(_RANDOM_BYTES))


def read_secret(text: str) -> str:
    """The normal form of what a person typed or pasted: words in lower case with single spaces, or any other text.

    Raises:
        ConfigError: empty, or words with a mistake; the message says which word.
    """
    listed = _places()
    words = text.lower().replace("-", " ").replace(",", " ").split()
    if len([word for word in words if word in listed]) < min(_MEANT_AS_WORDS, len(words) or 1):
        if not text.strip():
            raise ConfigError("The cluster secret is empty.")
        return text.strip()
    for place, word in enumerate(words, 1):
        if word not in listed:
            near = difflib.get_close_matches(word, listed, n=3)
            hint = f" Perhaps {' or '.join(near)}?" if near else ""
            raise ConfigError(f"Word {place} of the cluster secret, '{word}', is not one of the list.{hint}")
    if len(words) != WORDS:
        raise ConfigError(f"The cluster secret has {WORDS} words; these are {len(words)}.")
    if not _right(words):
        raise ConfigError(f"The words of the cluster secret do not belong together.{_suspects(words)}")
    return " ".join(words)


def _suspects(words: list[str]) -> str:
    """What single mistake would explain them, as a sentence."""
    found = []
    for place in range(WORDS - 1):
        swapped = [*words]
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        if _right(swapped):
            found.append(f"words {place + 1} and {place + 2} changed places")
    for place, word in enumerate(words):
        for near in difflib.get_close_matches(word, _places(), n=12, cutoff=0.6):
            if _right([*words[:place], near, *words[place + 1 :]]):
                found.append(f"word {place + 1} is '{near}' and not '{word}'")
    if found:
        return f" Perhaps {' or '.join(found)}."
    return " Compare each of them, and their order, with where they came from."


def _words(random: bytes) -> str:
    number = int.from_bytes(random, "big") << _CHECK_BITS | _check(random)
    listed = list(_places())
    return " ".join(listed[number >> _BITS * place & (1 << _BITS) - 1] for place in reversed(range(WORDS)))


def _right(words: list[str]) -> bool:
    number = 0
    for word in words:
        number = number << _BITS | _places()[word]
    random = (number >> _CHECK_BITS).to_bytes(_RANDOM_BYTES, "big")
    return number & (1 << _CHECK_BITS) - 1 == _check(random)


def _check(random: bytes) -> int:
    digest = hashlib.sha256(b"tandem cluster secret 1" + random).digest()
    return int.from_bytes(digest[:4], "big") >> 32 - _CHECK_BITS


@lru_cache(maxsize=1)
def _places() -> dict[str, int]:
    """The list's words with their places."""
    from mnemonic import Mnemonic

    return {word: place for place, word in enumerate(Mnemonic("english").wordlist)}
