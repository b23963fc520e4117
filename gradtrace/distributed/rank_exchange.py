"""Messages between rank 0 and the other ranks of a group, over one TCP connection each.

There are no collectives here, which would wait for all ranks: they may have different numbers of
steps or batches, be slow, end early or be killed. Rank 0 listens, and leaves its address in the
store of ``torch.distributed``; the others connect to it. Messages are lines of JSON, sent and
received by an asyncio loop in a thread of each process, so that sending never blocks. The kernel
closes the connections of a killed process at once, and detects by keep-alive packets that a machine
is gone; a process that is merely slow keeps its connection.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import Any

from gradtrace.distributed import tuning

Message = dict[str, Any]

KEEP_ALIVE = {
    "TCP_KEEPIDLE": tuning.SILENCE_SECONDS // 5,
    "TCP_KEEPINTVL": tuning.SILENCE_SECONDS // 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": tuning.SILENCE_SECONDS * 1000,
}
"""Options by which a connection to a machine that does not answer ends, where systems have them."""


class RankExchange:
    """One rank's end of the exchange; in a group of one (None) there is no thread and no message.

    Rank 0 sends to all others, and they send to rank 0. The n-th exchanges of a name that ranks
    make are connected. When a connection ends, ``{"gone": why}`` is received from that rank.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.rank, self.world = 0, 1
        self.inbox: deque[tuple[int, Message]] = deque()
        self.notify: Callable[[], object] | None = None  # called in the thread after a message
        self.failed = ""  # why messages can no longer be exchanged
        self.joined: set[int] = set()  # ranks that were connected
        self.changed = threading.Condition()  # notified when a rank joins, says something or leaves
        self._unsent: list[bytes] = []  # lines for ranks that have not joined yet
        self._writers: dict[int, StreamWriter] = {}
        self._talks: dict[Any, StreamWriter] = {}  # by task
        self._thread: threading.Thread | None = None
        if group is not None:
            self._start(group, name)

    def _start(self, group: Any, name: str) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        store: Any = dist.distributed_c10d._world.pg_map[group][1]
        try:
            with suppress(AttributeError, RuntimeError):  # not all stores can be cloned
                # a separate connection: requests on a shared one wait for each other
                store = store.clone()
                store.set_timeout(timedelta(seconds=tuning.STORE_TIMEOUT_SECONDS))
            number = store.add(f"gradtrace/{name}/{self.rank}", 1)
            own = dist.distributed_c10d.PrefixStore(f"gradtrace/{name}/{number}", store)
        except Exception as error:  # a store may raise anything
            self._fail(error)
            self._loop.close()
            return
        self._thread = threading.Thread(target=self._run, args=(own,), daemon=True)
        self._thread.start()

    @property
    def first(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def all_joined(self) -> bool:
        """Whether this rank is, or was, connected to all that it exchanges messages with."""
        return len(self.joined) == (self.world - 1 if self.first else 1)

    def send(self, message: Message) -> None:
        """Send a message: to rank 0, or from rank 0 to all others. Does not block."""
        if self._thread is not None:
            self._call(self._write, json.dumps(message).encode() + b"\n")

    def received(self) -> list[tuple[int, Message]]:
        """Take the messages that have arrived since the last call, each with its sender's rank."""
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def close(self, seconds: float) -> None:
        """Close the connections, and wait for at most ``seconds`` until all messages are sent.

        A rank that has not found rank 0 yet goes on trying in its thread.
        """
        if self._thread is not None:
            self._call(self._closing.set)
            if threading.current_thread() is not self._thread:
                self._thread.join(seconds)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the thread has ended, and closed its loop
            self._loop.call_soon_threadsafe(function, *args)

    # In the thread -------------------------------------------------------------------------------

    def _run(self, store: Any) -> None:
        try:
            self._loop.run_until_complete(self._serve(store) if self.first else self._join(store))
        except Exception as error:
            self._fail(error)
        finally:
            self._loop.close()
            with self.changed:
                self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self.failed = self.failed or f"{type(error).__name__}: {error}"
        self._closing.set()

    async def _serve(self, store: Any) -> None:
        self._token = secrets.token_hex(16)
        limit = tuning.MESSAGE_MAX_BYTES
        server = await asyncio.start_server(self._welcome, sock=_listening_socket(), limit=limit)
        port = server.sockets[0].getsockname()[1]
        store.set("address", json.dumps([socket.gethostname(), port, self._token]))
        await self._closing.wait()
        # a connection that asyncio is accepting when its server closes would be left open, and the
        # rank at its other end wait
        while accepting := asyncio.all_tasks() - {asyncio.current_task(), *self._talks}:
            await asyncio.wait(accepting)
        server.close()
        await self._hang_up()

    def _welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Talk to whoever has connected. Not a coroutine, so that ``_hang_up`` sees it at once."""
        self._keep_until_done(self._greet(reader, writer), writer)

    def _keep_until_done(self, talk: Coroutine[Any, Any, None], writer: StreamWriter) -> None:
        task = self._loop.create_task(talk)
        self._talks[task] = writer
        task.add_done_callback(self._talks.pop)

    async def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Talk to a rank, which shows by the token that it has read the store."""
        hello = b""
        with suppress(OSError, ValueError, asyncio.TimeoutError):
            hello = await asyncio.wait_for(reader.readline(), tuning.CONNECT_SECONDS)
        token, _, rank = hello.decode("ascii", "replace").strip().partition(" ")
        if token == self._token and rank.isdecimal() and not self._closing.is_set():
            writer.write(f"{token}\n".encode())
            self._enter(int(rank), writer)
            await self._talk(int(rank), reader, writer)
        writer.close()

    async def _join(self, store: Any) -> None:
        pause = tuning.FIRST_POLL_SECONDS
        while not store.check(["address"]):
            await asyncio.sleep(pause)
            pause = min(2 * pause, tuning.MAX_POLL_SECONDS)
        name, port, token = json.loads(store.get("address"))
        hosts = [*_store_host(store), name, "localhost"]
        for host in hosts:
            with suppress(OSError, asyncio.TimeoutError):
                talk = self._connect(host, port, token)
                reader, writer = await asyncio.wait_for(talk, tuning.CONNECT_SECONDS)
                break
        else:
            raise ConnectionError(f"rank 0 does not answer at port {port} of {' or '.join(hosts)}")
        self._enter(0, writer)
        self._keep_until_done(self._talk(0, reader, writer), writer)
        await self._closing.wait()
        await self._hang_up()

    async def _connect(self, host: str, port: int, token: str) -> tuple[StreamReader, StreamWriter]:
        limit = tuning.MESSAGE_MAX_BYTES
        reader, writer = await asyncio.open_connection(host, port, limit=limit)
        writer.write(f"{token} {self.rank}\n".encode())
        try:
            if await reader.readline() == f"{token}\n".encode():
                return reader, writer
            raise ConnectionError("this is another server")
        except BaseException:  # also if it does not answer in time
            writer.close()
            raise

    def _enter(self, rank: int, writer: StreamWriter) -> None:
        """Send a rank what was sent before it was connected."""
        _keep_alive(writer.get_extra_info("socket"))
        self._writers[rank] = writer
        writer.writelines(self._unsent)
        self.joined.add(rank)
        if self.all_joined:
            self._unsent.clear()
        self._notify()

    async def _talk(self, rank: int, reader: StreamReader, writer: StreamWriter) -> None:
        """Receive messages of a rank until its connection ends."""
        why = ""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self.inbox.append((rank, json.loads(line)))
                self._notify()
        except TimeoutError:
            why = f"gave no sign of life for {timedelta(seconds=tuning.SILENCE_SECONDS)}"
        except (OSError, ValueError):
            pass
        self._writers.pop(rank, None)
        writer.close()
        self.inbox.append((rank, {"gone": why}))
        if not self.first:
            self._fail(ConnectionError(f"rank 0 {why or 'ended'}"))
        self._notify()

    def _notify(self) -> None:
        try:
            if self.notify is not None:
                self.notify()
        except Exception as error:  # of whoever is notified: the thread must end in order
            self._fail(error)
        with self.changed:
            self.changed.notify_all()

    def _write(self, line: bytes) -> None:
        if not self.all_joined:
            self._unsent.append(line)
        for writer in self._writers.values():
            writer.write(line)

    async def _hang_up(self) -> None:
        """End all connections, after all that was written has arrived: the other side closes them.

        A connection that is closed before all has been read would be reset, and lose messages.
        """
        for writer in self._talks.values():
            if writer in self._writers.values():
                writer.write_eof()
            else:
                writer.transport.abort()
        self._writers.clear()  # nothing can be written after the end
        if self._talks:
            _, left = await asyncio.wait(self._talks, timeout=tuning.SILENCE_SECONDS)
            for task in left:
                self._talks[task].transport.abort()
            await asyncio.gather(*left)
        await self._loop.shutdown_default_executor()


def _keep_alive(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listening_socket() -> socket.socket:
    with suppress(OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _store_host(store: Any) -> list[str]:
    """The host of the store, which is often rank 0's; as this rank reaches it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return [store.host] if hasattr(store, "host") else []
