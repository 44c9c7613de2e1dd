"""The draft service, whose head drafts ahead or not: the mode holds for the sessions that are opened under it.

`python -m bench.ahead.draft CONTROL_FILE FLAGS...`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.ahead.control import Mode, Watch
from services.draft.process import app

if TYPE_CHECKING:
    from outrider.serving.messages import OpenSession
    from services.draft.drafters.feature import FeatureDrafter
    from services.draft.engine.engine import DraftEngine
    from services.draft.sessions.session import DraftSession


class SwitchedDraft:
    """Gives an engine's head the mode of a run."""

    def __init__(self, engine: DraftEngine, drafter: FeatureDrafter, control: Path) -> None:
        self._drafter, self._watch = drafter, Watch(control)
        self._open, self._features_changed = engine.open, drafter.features_changed
        self._corrects = True
        vars(engine)["open"] = self.open
        vars(drafter)["features_changed"] = self.features_changed

    def open(self, request: OpenSession) -> None:
        """As of DraftEngine."""
        if (setting := self._watch.changed()) is not None:
            self._drafter.drafts_ahead = setting.mode is not Mode.WAITING
            self._corrects = setting.mode is not Mode.OWN
        self._open(request)

    def features_changed(self, session: DraftSession) -> None:
        """As of FeatureDrafter. Without correction a tree that has survived grows on; the features are used later."""
        if self._corrects or not session.root_expanded:
            self._features_changed(session)


def main(control: str, flags: Sequence[str]) -> int:
    """Run the service. Returns its exit code."""

    def prepare(engine: DraftEngine) -> None:
        from services.draft.drafters.feature import FeatureDrafter

        assert isinstance(engine.drafter, FeatureDrafter), "the benchmark is about drafters that read features"
        SwitchedDraft(engine, engine.drafter, Path(control))

    return app.main(flags, prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
