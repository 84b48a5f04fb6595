"""The node's persistent id, and the lock that keeps one process per data folder."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from tandem.errors import ConfigError


def node_id(home: Path) -> str:
    """The id kept in `home/node_id`: 32 hex digits, made at first use.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = home / "node_id"
    try:
        home.mkdir(parents=True, exist_ok=True)
        temporary = home / f".node_id.{os.getpid()}"
        if not path.exists():
            temporary.write_text(secrets.token_hex(16))
            # A link fails when another process was first, whose id then counts.
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"The data folder {home} cannot be used: {error}. Set TANDEM_HOME to a writable one."
        ) from error


class HomeLock:
    """Held by the one `tandem up` that owns a data folder; released by the operating system when it dies.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._file = (home / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise ConfigError(
                f"Another tandem (process {owner}) uses the data folder {home}. Stop it, or set "
                "TANDEM_HOME to another folder."
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Give the folder up."""
        self._file.close()
