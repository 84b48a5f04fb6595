"""The process behind `tandem up`: node, HTTP server, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tandem import garbage
from tandem.api.server import HttpServer, serve
from tandem.cli.announce import Announcer, EventAnnouncer, HumanAnnouncer
from tandem.cli.failure import INTERRUPTED
from tandem.cli.loading import show_loading
from tandem.cli.membership import membership
from tandem.cli.output import note
from tandem.cli.progress import View, callback_for, progress_view
from tandem.cluster.identity import HomeLock
from tandem.cluster.node import Node
from tandem.config import Settings
from tandem.engines.installed import require
from tandem.engines.sim.profile import is_sim_reference, parse_sim_reference
from tandem.errors import ConfigError, TandemError
from tandem.models.store import LocalModel


def serve_forever(
    settings: Settings, references: Sequence[str], *, events: bool, verbose: bool, until_eof: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM, then stop in order and return.

    Args:
        references: models to load, at least one.
        events: announce in JSON.
        verbose: log what the node does.
        until_eof: the end of standard input ends it, too.

    Raises:
        ConfigError: the data folder or the address is taken.
        TandemError: a model could not be obtained or loaded.
    """
    try:
        lock = HomeLock(settings.home)
    except OSError as error:
        raise ConfigError(f"The data folder {settings.home} cannot be used: {error}. Set TANDEM_HOME.") from error
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_Serving(settings, references, events, verbose, until_eof).run())
    finally:
        lock.release()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


class _Serving:
    def __init__(
        self, settings: Settings, references: Sequence[str], events: bool, verbose: bool, until_eof: bool
    ) -> None:
        self._settings = settings
        self._references = references
        self._events = events
        self._verbose = verbose
        self._until_eof = until_eof
        self._announcer: Announcer = EventAnnouncer() if events else HumanAnnouncer()
        self._stop = asyncio.Event()
        self._failure: TandemError | None = None

    async def run(self) -> None:
        self._take_signals()
        if self._until_eof:
            loop = asyncio.get_running_loop()
            threading.Thread(target=_await_eof, args=(loop, self._stop.set), name="standard input", daemon=True).start()
        _set_log_level(logging.INFO if self._verbose else logging.CRITICAL)
        node = Node(self._settings)
        server: HttpServer | None = None
        try:
            await node.start(self._conflict)
            server = await serve(node, self._settings)
            node.serves_at(server.port)
            self._announcer.listening(server.url)
            if await self._unless_stopped(self._load(node)):
                place = membership(self._settings, node.secret, node.node_id, node.state.nodes)
                self._announcer.ready(server.url, node.local.instances(), bool(self._settings.api_key), place)
                # While models load, the view says what fails; from now on only the log does.
                _set_log_level(logging.INFO if self._verbose else logging.WARNING)
                garbage.settle()
                await self._unless_stopped(server.wait())
            if self._failure is not None:
                raise self._failure
        except TandemError as error:
            self._announcer.failed(error)
            raise
        finally:
            deadline = self._settings.stop_deadline
            own = len(server.context.running) if server is not None else 0
            # Whoever reads this may be gone. That is a reason to stop, and none to leave anything behind.
            with contextlib.suppress(BrokenPipeError):
                self._announcer.stopping(own + node.answering, deadline)
            finishing = [node.finish(deadline)]
            if server is not None:
                finishing.append(server.stop(deadline))
            await asyncio.gather(*finishing)
            await node.stop()
            with contextlib.suppress(BrokenPipeError):
                self._announcer.stopped()

    def _conflict(self, error: ConfigError) -> None:
        self._failure = error
        self._stop.set()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            # Runners end by themselves when the socket to their server closes.
            note("Stopping at once.")
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work` to its end, or drop it when the process is asked to stop. Returns whether it was done."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            task.result()
            return not self._stop.is_set()
        task.cancel()
        await asyncio.wait({task})
        return False

    async def _load(self, node: Node) -> None:
        with progress_view(events=self._events) as view:
            with node.models.expecting(self._references):
                models = [await self._obtain(node, reference, view) for reference in self._references]
                instances = await node.run_here(models, engine=self._settings.engine)
            await show_loading(node, instances, view)

    async def _obtain(self, node: Node, reference: str, view: View) -> LocalModel | str:
        if is_sim_reference(reference):
            parse_sim_reference(reference)
        else:
            require(self._settings.engine, self._settings.home)
        return await node.downloads.obtain(reference, callback_for(view, reference))


def _await_eof(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    """Call `ended` on the loop when standard input ends: whoever holds its other end is gone, however it went.

    Not through `sys.stdin`, whose lock a thread that waits would hold when the interpreter ends.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped anyway
        loop.call_soon_threadsafe(ended)


def _set_log_level(level: int) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(level)
