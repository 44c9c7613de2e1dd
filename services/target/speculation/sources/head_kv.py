"""Which rows of which sessions a head has written: what it must compute before it can draft.

    rows  0 ......... known | ......... length - 2 |      row j: the token at j + 1 beside the state of the one at j
          written by it     | to be written        |

The states are the model's, which keeps them in the cache for every row that it computes, whether a head drafts or not.

A page's last row depends on the token behind the page. Where texts part exactly there, that row is of the text that
came first: one of many that a guess looks at, and of no weight for what is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.step.batch import SessionWork


class HeadKV:
    """The book of one engine's head; a `PageObserver`."""

    def __init__(self, prefix: PrefixCache) -> None:
        self._page_size = prefix.allocator.page_size
        self._known: dict[int, int] = {}
        self._written: dict[int, bool] = {}  # of the cache's pages: all of its rows are
        if prefix.enabled:
            prefix.observers.append(self)

    def lacking(self, session: Session) -> SessionWork:
        """A session's rows that are to be written: at least the last one, after which the head draws."""
        return SessionWork(Chunk(session, min(self._known.get(session.id, 0), session.length - 2), session.length - 1))

    def wrote(self, chunk: Chunk) -> None:
        """The head has written what `lacking` said."""
        session, size = chunk.session, self._page_size
        for index in range(chunk.start // size, min(chunk.stop // size, session.table.shared)):
            self._written[int(session.table.pages[index])] = True
        self._known[session.id] = chunk.stop

    def computed(self, works: Sequence[SessionWork]) -> None:
        """The model writes rows: what the head knew of them is no longer true."""
        known = self._known
        for work in works:
            session_id, start = work.chunk.session.id, work.chunk.start
            if known.get(session_id, 0) > start:
                known[session_id] = start

    def close(self, session_id: int) -> None:
        """The session has given its pages back."""
        self._known.pop(session_id, None)

    # --- what the prefix cache tells ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """The owner's own page, or one of the same tokens that another session has computed."""
        start = index * self._page_size
        known = self._known.get(owner, 0)
        if page not in self._written:
            self._written[page] = known >= start + self._page_size
        elif not self._written[page] and known > start:
            self._known[owner] = start

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """Its rows lie with the page."""
        del owner, index, page
        return True

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """A page that the session need not compute, and the head neither if it has written it."""
        start = index * self._page_size
        known = min(self._known.get(owner, 0), start)
        self._known[owner] = start + self._page_size if known == start and self._written.get(page) else known

    def page_dropped(self, page: int) -> None:
        """It will hold other tokens."""
        self._written.pop(page, None)
