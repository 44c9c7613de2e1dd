"""Batches that a thread prepares while the device computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from services.draft.learning.records.batches import Batch

_DEPTH = 4  # batches that wait


class AheadOfTime:
    """An iterator over a stream that a thread reads ahead. waited: seconds for which its caller has waited.

    Use: `with AheadOfTime(stream) as batches`; the thread ends with the context.
    """

    def __init__(self, stream: Iterator[Batch]) -> None:
        self.waited = 0.0
        self._stream = stream
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_DEPTH)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="batches", daemon=True)

    def __enter__(self) -> AheadOfTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        while self._thread.is_alive():  # it may wait for room
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> AheadOfTime:
        return self

    def __next__(self) -> Batch:
        began = time.monotonic()
        found = self._ready.get()
        self.waited += time.monotonic() - began
        if isinstance(found, BaseException):
            raise found
        if found is None:
            raise StopIteration
        return found

    def _read(self) -> None:
        try:
            for batch in self._stream:
                self._ready.put(batch)
                if self._over.is_set():
                    return
            self._ready.put(None)
        except BaseException as error:  # raised where the batch is wanted
            self._ready.put(error)
