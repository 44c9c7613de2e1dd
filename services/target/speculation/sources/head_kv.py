"""KV rows of a local EAGLE head: which rows of each session it has written, and which it must write before it drafts.

    rows  0 ...... known_rows | ......... length - 2 |   row j: the token at j + 1 and the state of the token at j
          written by the head | missing              |

The model keeps the hidden states of all tokens that it computes in the cache, whether a head drafts or not.

The last row of a page depends on the token behind the page. Where two texts differ exactly there, the row belongs to
the text that came first. One wrong row of many hardly changes a draft token, and does not change verification.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.step.batch import SessionWork


class HeadKV:
    """The written rows of one engine's head; a `PageObserver` of the prefix cache.

    known_rows:    by session id, the rows that the head has written
    written_pages: by page of the prefix cache, True if the head has written all of its rows
    """

    def __init__(self, prefix: PrefixCache) -> None:
        self.known_rows: dict[int, int] = {}
        self.written_pages: dict[int, bool] = {}
        self._page_size = prefix.allocator.page_size
        if prefix.enabled:
            prefix.observers.append(self)

    def missing_rows(self, session: Session) -> SessionWork:
        """A session's rows that the head must write: at least the last one, after which it samples a draft token."""
        start = min(self.known_rows.get(session.id, 0), session.length - 2)
        return SessionWork(Chunk(session, start, session.length - 1))

    def mark_written(self, chunk: Chunk) -> None:
        """The head has written these rows, the first of which was the first missing one."""
        session, size = chunk.session, self._page_size
        for index in range(chunk.start // size, min(chunk.stop // size, session.table.shared)):
            self.written_pages[int(session.table.pages[index])] = True
        self.known_rows[session.id] = chunk.stop

    def invalidate(self, works: Sequence[SessionWork]) -> None:
        """The model computes these tokens anew: the head's rows of them are no longer valid."""
        known_rows = self.known_rows
        for work in works:
            session_id, start = work.chunk.session.id, work.chunk.start
            if known_rows.get(session_id, 0) > start:
                known_rows[session_id] = start

    def close(self, session_id: int) -> None:
        """The session has returned its pages."""
        self.known_rows.pop(session_id, None)

    # --- PageObserver ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """A session's page is cached. page: its own, or one of the same tokens that another session computed first."""
        start = index * self._page_size
        known = self.known_rows.get(owner, 0)
        if page not in self.written_pages:
            self.written_pages[page] = known >= start + self._page_size
        elif not self.written_pages[page] and known > start:
            self.known_rows[owner] = start

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """True: a cached page can be used whether the head has written its rows or not."""
        del owner, index, page
        return True

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """A session uses a cached page; the head need not write its rows if it has done so before."""
        start = index * self._page_size
        known = min(self.known_rows.get(owner, 0), start)
        self.known_rows[owner] = start + self._page_size if known == start and self.written_pages.get(page) else known

    def page_dropped(self, page: int) -> None:
        """A page leaves the cache and will hold other tokens."""
        self.written_pages.pop(page, None)
