"""The runner subprocess: one engine, one model, a loop.

Threads: the main thread is the engine thread. A reader takes messages off the socket and hands prompts to a small
pool for `Engine.prepare`; a writer sends events, so that a slow server never holds the engine up; a heartbeat proves
that the process lives even while the engine is in a long step. When the socket closes the server is gone, and the
runner with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tandem.engines.base import Engine, EngineOptions, Output, PrefillPort, Prepared
from tandem.engines.registry import build_engine
from tandem.errors import TandemError
from tandem.kv.server import PrefillServer, ServerOptions
from tandem.kv.tls import identity_for
from tandem.runner.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    Broken,
    CacheIdentity,
    Cancel,
    FromRunner,
    Heartbeat,
    Loaded,
    Loading,
    NamePeers,
    Outputs,
    Ready,
    Start,
    Stop,
    Submit,
    ToRunner,
    frame,
    to_runner_decoder,
)
from tandem.types import EngineLoad, Failure

HEARTBEAT_SECONDS = 1.0
PREPARE_THREADS = 2

logger = logging.getLogger("tandem.runner")


class _Refused:
    """A request that `prepare` refused."""

    def __init__(self, request_id: str, failure: Failure) -> None:
        self.request_id = request_id
        self.failure = failure


class _Wake:
    """One of the engine's own threads has something for it."""


class Runner:
    """The loop around one engine.

    Args:
        channel: connected stream socket to the supervisor.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._input = channel.makefile("rb", buffering=1 << 16)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Prepared | _Refused | Cancel | NamePeers | Stop | _Wake] = queue.SimpleQueue()
        self._kv_port: PrefillServer | None = None
        self._preparing: set[str] = set()
        self._cancelled: set[str] = set()
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._engine: Engine
        self._load_now: Callable[[], EngineLoad] = EngineLoad

    def run(self) -> int:
        """Serve until told to stop.

        Returns:
            The process's exit status.
        """
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        try:
            start = self._receive()
            if not isinstance(start, Start):
                return 2
            self._start_engine(start.options)
            threading.Thread(target=self._read, name="reader", daemon=True).start()
            self._send(self._open_kv_port(start.options))
            self._loop()
            status = 0
        except TandemError as error:
            logger.error("%s: %s", error.code, error.message)
            self._send(Broken(Failure.of(error)))
            status = 1
        except BaseException as error:  # the process ends here; the supervisor must learn why
            logger.exception("the engine failed")
            self._send(Broken(Failure.of(error)))
            status = 1
        self._outbox.put(None)
        writer.join(timeout=5)
        return status

    def _start_engine(self, options: EngineOptions) -> None:
        # An engine's libraries may take half a minute to import on a busy machine.
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._engine = build_engine(options)
        self._engine.wake = lambda: self._inbox.put(_Wake())
        self._load_now = self._engine.load_now
        info = self._engine.load(lambda progress: self._send(Loading(progress.done, progress.total)))
        self._send(Loaded(info))
        self._engine.warm_up()

    def _open_kv_port(self, options: EngineOptions) -> Ready:
        plane = self._engine.kv_plane() if options.kv_port >= 0 else None
        if plane is None:
            return Ready()
        identity = identity_for(options.cluster_secret, options.node_id)
        listen = ServerOptions(
            host=options.kv_host, port=options.kv_port, node=options.node_id, open=options.cluster_open
        )
        self._kv_port = PrefillServer(
            plane.producer,
            plane.layout,
            plane.fingerprint,
            identity=identity,
            options=listen,
            checkpoints=plane.checkpoints,
        )
        fingerprint = plane.fingerprint
        names = CacheIdentity(fingerprint.digest().hex(), fingerprint.tokenizer, fingerprint.layout)
        return Ready(self._kv_port.address, names)

    def _loop(self) -> None:
        engine = self._engine
        while True:
            while not self._inbox.empty() or not engine.has_work:
                message = self._inbox.get()
                if isinstance(message, Stop):
                    if self._kv_port is not None:
                        self._kv_port.close()
                    engine.close()
                    return
                self._handle(message)
            outputs = engine.step()
            if outputs:
                self._send(Outputs(list(outputs)))

    def _handle(self, message: Prepared | _Refused | Cancel | NamePeers | _Wake) -> None:
        if isinstance(message, _Wake):
            return
        if isinstance(message, NamePeers):
            self._name_peers(message.peers)
            return
        if isinstance(message, Cancel):
            # A request still being prepared is unknown to the engine; remember to drop it when it arrives.
            if message.request_id in self._preparing:
                self._cancelled.add(message.request_id)
            else:
                self._engine.cancel(message.request_id)
            return
        self._preparing.discard(message.request_id)
        if message.request_id in self._cancelled:
            self._cancelled.discard(message.request_id)
        elif isinstance(message, _Refused):
            self._send(Outputs([Output(message.request_id, [message.failure])]))
        else:
            self._engine.submit(message)

    def _name_peers(self, peers: tuple[PrefillPort, ...]) -> None:
        try:
            self._engine.name_peers(peers)
        except TandemError as error:
            addresses = ", ".join(peer.address for peer in peers)
            logger.error("prefill peers %s are not used: %s", addresses, error.message)

    def _prepare(self, submit: Submit) -> None:
        try:
            prepared: Prepared | _Refused = self._engine.prepare(submit.request_id, submit.request)
        except TandemError as error:
            prepared = _Refused(submit.request_id, Failure.of(error))
        except Exception as error:
            logger.exception("could not prepare request %s", submit.request_id)
            prepared = _Refused(submit.request_id, Failure.of(error))
        self._inbox.put(prepared)

    def _read(self) -> None:
        while True:
            message = self._receive()
            if message is None:
                logger.warning("the server is gone; exiting")
                os._exit(3)
            if isinstance(message, Submit):
                self._preparing.add(message.request_id)
                self._pool.submit(self._prepare, message)
            elif isinstance(message, Cancel | NamePeers | Stop):
                self._inbox.put(message)

    def _receive(self) -> ToRunner | None:
        header = self._input.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes is over the limit")
        body = self._input.read(length)
        return to_runner_decoder.decode(body) if len(body) == length else None

    def _send(self, message: FromRunner) -> None:
        self._outbox.put(frame(message))

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._channel.sendall(data)
            except OSError:
                os._exit(3)

    def _beat(self) -> None:
        waiter = threading.Event()
        while not waiter.wait(HEARTBEAT_SECONDS):
            self._send(Heartbeat(self._load_now()))


def _die(arguments: threading.ExceptHookArgs) -> None:
    # A runner that lost its reader or writer would look alive and answer nobody.
    logger.critical("thread %s failed", arguments.thread, exc_info=arguments.exc_value)
    os._exit(4)


def main() -> None:
    """Entry point: `python -m tandem.runner.process --fd N`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.excepthook = _die
    status = Runner(socket.socket(fileno=arguments.fd)).run()
    # Worker threads may sit in a long prepare; nothing of theirs is wanted any more.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
