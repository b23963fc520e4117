"""Messages between ranks. Those of one process share a store, which stands for that of a group."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gradtrace.distributed import rank_exchange
from gradtrace.distributed.rank_exchange import Message, RankExchange
from torch.distributed import distributed_c10d

dist = torch.distributed
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")


class Member(NamedTuple):
    rank: int
    world: int


Joins = Callable[[int], RankExchange]


STORES: dict[str, Callable[[Path], Any]] = {
    "tcp": lambda path: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "file": lambda path: dist.FileStore(str(path / "store"), 3),
    "hash": lambda path: dist.HashStore(),
    "not cloned": lambda path: Uncloned(),
}


class Uncloned(dist.Store):
    """A store as users may write one."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.held[key] = str(int(self.held.get(key, 0)) + amount).encode()
        return int(self.held[key])


@pytest.fixture
def joins(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Joins]:
    """Makes the exchange of a rank of three; all are closed in the end."""
    store = STORES[getattr(request, "param", "tcp")](tmp_path)
    made: list[RankExchange] = []
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.world)

    def join(rank: int) -> RankExchange:
        member: Any = Member(rank, 3)
        monkeypatch.setitem(distributed_c10d._world.pg_map, member, ("", store))
        made.append(RankExchange(member, "test"))
        made[-1].store = store  # type: ignore[attr-defined]
        return made[-1]

    yield join
    for exchange in reversed(made):
        exchange.close(10)
        assert exchange._thread is not None and not exchange._thread.is_alive()


def until(there: Callable[[], object]) -> None:
    last = time.monotonic() + 60
    while not there() and time.monotonic() < last:
        time.sleep(0.01)
    assert there()


def taken(exchange: RankExchange, count: int) -> list[tuple[int, Message]]:
    until(lambda: len(exchange.inbox) >= count)
    return sorted(exchange.received(), key=lambda item: item[0])


@pytest.mark.parametrize("joins", STORES, indirect=True)
def test_messages_reach_ranks_that_join_later(joins: Joins) -> None:
    second = joins(2)
    second.send({"early": "x" * 5_000_000})
    first = joins(0)
    first.send({"to": "all"})
    assert taken(first, 1) == [(2, {"early": "x" * 5_000_000})]
    third = joins(1)
    third.send({"late": 1})
    assert taken(first, 1) == [(1, {"late": 1})]
    assert taken(second, 1) == taken(third, 1) == [(0, {"to": "all"})]
    assert first.joined == {1, 2} and not first.failed


def test_the_end_of_a_rank_is_received_after_its_last_message(joins: Joins) -> None:
    first, second = joins(0), joins(1)
    second.send({"last": 1})
    second.close(10)
    assert taken(first, 2) == [(1, {"last": 1}), (1, {"gone": ""})]
    assert not first.failed
    third = joins(2)
    until(lambda: third.joined)
    first.close(10)
    first.send({"after": "the end"})
    until(lambda: third.failed)
    assert "rank 0 ended" in third.failed
    third.send({"nobody": "listens"})


def test_what_is_sent_before_the_end_arrives_where_rank_0_comes_later(joins: Joins) -> None:
    second = joins(1)
    second.send({"last": 1})
    second.close(0)
    assert taken(joins(0), 2) == [(1, {"last": 1}), (1, {"gone": ""})]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff 1\n", b"token 1\n"])
def test_strangers_are_not_listened_to(joins: Joins, said: bytes) -> None:
    first, second = joins(0), joins(1)
    until(lambda: first.joined)
    store: Any = first.store  # type: ignore[attr-defined]
    address = json.loads(store.get("gradtrace/test/1/address"))
    with socket.create_connection(("127.0.0.1", address[1])) as stranger:
        stranger.sendall(said)
        second.send({"hello": 1})
        assert taken(first, 1) == [(1, {"hello": 1})]
        assert first.joined == {1} and not first.failed
        first.close(10)  # does not wait for the stranger


def test_a_rank_that_comes_while_rank_0_closes_is_not_left_waiting(joins: Joins) -> None:
    first = joins(0)
    store: Any = first.store  # type: ignore[attr-defined]
    until(lambda: store.check(["gradtrace/test/1/address"]))
    _, port, token = json.loads(store.get("gradtrace/test/1/address"))
    come = threading.Event()

    def close_meanwhile() -> None:
        come.wait(10)
        first._closing.set()

    first._call(close_meanwhile)  # the loop accepts nobody until then
    with socket.create_connection(("127.0.0.1", port), 10) as late:
        late.settimeout(10)
        come.set()
        with suppress(ConnectionError):  # it was not even accepted
            late.sendall(f"{token} 1\n".encode())
            while late.recv(100):  # until the other side has closed it
                pass


def test_an_address_where_another_server_answers(joins: Joins) -> None:
    """As when a port of this machine has been given to another program."""
    second = joins(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = json.dumps(["no.such.host.invalid", server.getsockname()[1], "token"])
        second.store.set("gradtrace/test/1/address", address)  # type: ignore[attr-defined]
        connection, _ = server.accept()
        connection.sendall(b"220 smtp\r\n")
        server.close()
        until(lambda: second.failed)
        connection.close()
    assert "rank 0 does not answer at port" in second.failed


def test_an_error_of_the_receiver_ends_the_exchange(joins: Joins) -> None:
    first, second = joins(0), joins(1)

    def full() -> None:
        raise OSError("no space left")

    until(lambda: first.joined)
    first.notify = full
    second.send({"result": 1})
    until(lambda: second.failed)
    assert first.failed == "OSError: no space left"


def test_machines_that_vanish_are_detected(joins: Joins) -> None:
    first, second = joins(0), joins(1)
    until(lambda: first.joined and second.joined)
    for exchange in (first, second):
        (writer,) = exchange._writers.values()
        connection = writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in rank_exchange.KEEP_ALIVE.items():
            if hasattr(socket, name):
                assert connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_a_store_that_is_gone_is_told(joins: Joins, monkeypatch: pytest.MonkeyPatch) -> None:
    member: Any = Member(1, 2)
    monkeypatch.setitem(distributed_c10d._world.pg_map, member, ("", None))
    exchange = RankExchange(member, "test")
    assert exchange.failed and (exchange.rank, exchange.world) == (1, 2)
    exchange.send({"nobody": "listens"})
    exchange.close(10)
