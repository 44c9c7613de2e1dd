"""The target service, whose steps have the time of a larger model: after computing, the engine sleeps.

`python -m bench.ahead.target CONTROL_FILE COUNTS_FILE FLAGS...`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.ahead.control import Counts, Mode, Setting, Watch, write
from services.target.process import app

if TYPE_CHECKING:
    from outrider.serving.messages import StepOutput
    from services.target.engine.engine import TargetEngine
    from services.target.speculation.modes.policy import ModePolicy

_LONGEST_WAIT = 10.0  # seconds, in the mode that always waits


class PacedTarget:
    """Gives an engine's steps their time, and the engine its speculation mode."""

    def __init__(self, engine: TargetEngine, control: Path, counts: Path) -> None:
        self._engine, self._watch, self._file = engine, Watch(control), counts
        self._counts, self._seconds = Counts(), 0.0
        self._lengths: dict[int, int] = {}  # by open session: committed tokens
        self._policies: dict[Setting, ModePolicy] = {}
        engine.speculation.multi_step.window = 0.0  # plain steps of a large model come one by one
        self._step, self._compute = engine.step, engine.launcher.compute
        vars(engine)["step"] = self.step
        vars(engine.launcher)["compute"] = self.compute

    def step(self) -> StepOutput:
        """As of TargetEngine."""
        if not self._lengths and (setting := self._watch.changed()) is not None:
            self._seconds = setting.step_ms / 1e3
            self._set_mode(setting)
        output = self._step()
        for commit in output.commits:
            if commit.session_id in self._lengths:
                self._counts = self._counts._replace(
                    steps=self._counts.steps + 1, drafted=self._counts.drafted + (commit.verified > 0)
                )
            self._lengths[commit.session_id] = commit.base_length + len(commit.tokens)
        ended = self._lengths.keys() - self._engine.sessions.by_id.keys()
        for session_id in ended:
            del self._lengths[session_id]
        if ended:
            self._counts = self._counts._replace(sessions=self._counts.sessions + len(ended))
            write(self._file, self._counts)
        return output

    def compute(self, *arguments: Any, **options: Any) -> Any:
        """As of Launcher."""
        end = time.perf_counter() + self._seconds
        launched = self._compute(*arguments, **options)
        time.sleep(max(0.0, end - time.perf_counter()))
        return launched

    def _set_mode(self, setting: Setting) -> None:
        """The mode's policy; what it has measured under the same setting before stays."""
        from services.target.speculation.modes.mode import SpeculationMode
        from services.target.speculation.modes.policy import SERVICE_MODES, ModePolicy

        if (policy := self._policies.get(setting)) is None:
            if setting.mode is Mode.AUTO:
                policy = ModePolicy(SERVICE_MODES)
            elif setting.mode is Mode.WAITING:
                policy = ModePolicy([SpeculationMode.WAIT_FOR_DRAFT], longest=_LONGEST_WAIT)
            else:
                policy = ModePolicy([SpeculationMode.DRAFT_IF_READY])
            self._policies[setting] = policy
        self._engine.speculation.policy = policy


def main(control: str, counts: str, flags: Sequence[str]) -> int:
    """Run the service. Returns its exit code."""

    def prepare(engine: TargetEngine) -> None:
        PacedTarget(engine, Path(control), Path(counts))

    return app.main(flags, prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
