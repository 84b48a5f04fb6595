"""Settings that cannot be used say so."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tandem.config import Settings


@pytest.mark.parametrize("peers", ["", "10.0.0.2:52420", "[::1]:1, host.local:65535 ,"])
def test_prefill_peers(peers: str) -> None:
    assert Settings(prefill_peers=peers).prefill_peers == peers


@pytest.mark.parametrize("peers", ["foo", "host:", ":1", "host:x", "host:0", "host:65536", "a:1,b"])
def test_prefill_peers_have_a_form(peers: str) -> None:
    with pytest.raises(ValidationError, match="host:port"):
        Settings(prefill_peers=peers)
