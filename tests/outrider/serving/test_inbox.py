"""The engine thread's inbox: items of other threads, and connections."""

import contextlib
import queue
import socket
import threading
import time

import pytest

from outrider.serving.inbox import Inbox


@pytest.fixture
def inbox():
    inbox = Inbox()
    inbox.open()
    yield inbox
    inbox.close()


@pytest.fixture
def connection():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_items_are_in_order_also_those_from_before_it_was_open():
    inbox = Inbox()
    inbox.put(1)
    inbox.put(2)
    inbox.open()
    inbox.put(3)
    assert [inbox.get(), inbox.get(1.0), inbox.get(None)] == [1, 2, 3]
    with pytest.raises(queue.Empty):
        inbox.get()
    inbox.put(4)
    inbox.close()
    assert inbox.get() == 4
    with pytest.raises(queue.Empty):
        inbox.get()


def test_a_waiting_reader_is_woken(inbox):
    for item in range(200):  # each after another pause, so that some come just as the reader goes to sleep
        threading.Timer(1e-5 * item, inbox.put, [item]).start()
        assert inbox.get(10.0) == item


def test_many_threads_put_and_nothing_is_lost(inbox):
    def put(thread):
        for i in range(2000):
            inbox.put((thread, i))

    threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    items = [inbox.get(10.0) for _ in range(8000)]
    for thread in threads:
        thread.join()
    for i in range(4):
        assert [n for owner, n in items if owner == i] == list(range(2000))


def test_get_waits_for_its_timeout(inbox):
    for seconds in (0.001, 0.05):
        start = time.monotonic()
        with pytest.raises(queue.Empty):
            inbox.get(seconds)
        assert seconds <= time.monotonic() - start + 0.001


def test_connections_are_read_before_queued_items(inbox, connection):
    here, there = connection
    inbox.watch(here.fileno(), lambda _: inbox.put(here.recv(10)))
    inbox.put(b"first")
    there.send(b"second")
    assert inbox.get() == b"first"
    assert inbox._items[0] == b"second"
    there.send(b"third")
    assert [inbox.get(10.0), inbox.get(10.0)] == [b"second", b"third"]
    threading.Timer(0.01, there.send, [b"fourth"]).start()
    assert inbox.get(10.0) == b"fourth"
    inbox.forget(here.fileno())
    inbox.forget(here.fileno())
    there.send(b"fifth")
    with pytest.raises(queue.Empty):
        inbox.get(0.01)


def test_a_writer_is_called_when_the_connection_has_room(inbox, connection):
    here, there = connection
    here.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            here.send(bytes(100_000))
    inbox.watch(here.fileno(), lambda _: inbox.put("room"), writes=True)
    with pytest.raises(queue.Empty):
        inbox.get(0.01)
    there.recv(1 << 20)
    assert inbox.get(10.0) == "room"
