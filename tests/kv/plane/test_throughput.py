"""How fast entries move over loopback, beside a plain socket that moves as many bytes into fresh memory. Printed, and
not judged: a busy machine makes any number."""

from __future__ import annotations

import socket
import ssl
import threading
import time

import numpy as np
import pytest

from tandem.kv.client import Handoff
from tandem.kv.job import Admission, PrefillJob
from tandem.kv.layout import Layer, Layout, Part
from tandem.kv.plan import Wanted
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.staging import Staging
from tandem.kv.tls import Authority
from tests.kv.layouts import fingerprint
from tests.kv.plane.support import HeldProducer

TOKENS, CHUNK, LAYERS = 2048, 512, 12
PARTS = (Part("keys", 8, 128, "bfloat16"), Part("values", 8, 128, "bfloat16"))
LAYOUT = Layout((Layer("tokens", PARTS),) * LAYERS)
ENTRIES = np.random.default_rng(0).integers(0, 1 << 15, (8, TOKENS, 128)).astype(np.uint16)


class Instant(HeldProducer):
    """Emits the same entries for every layer, as fast as they can be taken."""

    def submit(self, job: PrefillJob) -> Admission:
        threading.Thread(target=self._emit, args=(job,)).start()
        return Admission()

    def _emit(self, job: PrefillJob) -> None:
        for first in range(0, TOKENS, CHUNK):
            for layer in range(LAYERS):
                for part in (0, 1):
                    job.emit(layer, part, first, ENTRIES[:, first : first + CHUNK])
        job.finish()


def plain_seconds(contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None, total: int) -> float:
    """Time to receive so many bytes from a plain (or TLS) socket into memory of their own."""
    listener = socket.create_server(("127.0.0.1", 0))
    source = memoryview(ENTRIES.reshape(-1).view(np.uint8))

    def send() -> None:
        sock, _ = listener.accept()
        secure = contexts[0].wrap_socket(sock, server_side=True) if contexts else sock
        with secure:
            sent = 0
            while sent < total:
                piece = source[: min(1 << 20, total - sent)]
                secure.sendall(piece)
                sent += len(piece)
            secure.recv(1)

    thread = threading.Thread(target=send)
    thread.start()
    raw = socket.create_connection(listener.getsockname())
    with contexts[1].wrap_socket(raw) if contexts else raw as sock:
        memory = memoryview(np.empty(total, np.uint8))
        began, received = time.perf_counter(), 0
        while received < total:
            received += sock.recv_into(memory[received : received + (1 << 20)])
        seconds = time.perf_counter() - began
    thread.join()
    listener.close()
    return seconds


@pytest.mark.parametrize("secret", [False, True], ids=["plain", "tls"])
def test_throughput(secret: bool, capsys: pytest.CaptureFixture[str]) -> None:
    identity = Authority("a secret for measuring").issue("node") if secret else None
    contexts = (identity.server_context(), identity.client_context()) if identity else None
    total = LAYOUT.bytes_between(0, TOKENS)
    ours, plain = [], []
    with PrefillServer(Instant(), LAYOUT, fingerprint(LAYOUT), identity=identity, options=ServerOptions()) as server:
        client = Handoff(server.address, fingerprint(LAYOUT), identity=identity)
        client.connect()
        for _ in range(3):
            staging = Staging(LAYOUT, Wanted(0, TOKENS))
            began = time.perf_counter()
            outcome = client.transfer(range(TOKENS), staging).run()
            ours.append(time.perf_counter() - began)
            assert outcome.error is None
            assert outcome.payload_bytes == total
            np.testing.assert_array_equal(staging.entries(LAYERS - 1, 1, 0, TOKENS), ENTRIES)
            del staging
            plain.append(plain_seconds(contexts, total))
        client.close()
    rate, bound = total / min(ours) / 1e9, total / min(plain) / 1e9
    with capsys.disabled():
        print(
            f"\n{'TLS' if secret else 'plain'}: hand-off {rate:.2f} GB/s, socket {bound:.2f} GB/s, {rate / bound:.2f}"
        )
