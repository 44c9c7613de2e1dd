"""The parts of the gateway that the facades use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from gateway.admission.admission import Keys
from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.control.worker_answers import abort_everywhere
from gateway.facade.bundle import bundle
from gateway.orchestration.generator import Generator
from outrider.tracing import Tracing


@dataclass(frozen=True)
class Backend:
    """The parts of the gateway behind the facades' calls: those of one model, because their messages name none."""

    generator: Generator
    facts: Facts
    control: Control
    keys: Keys
    tracing: Tracing | None = None
    started: float = field(default_factory=time.time)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The tokenizer's files and the model's configuration, by name."""
        return dict(self.facts.tokenizer_files)

    @cached_property
    def archive(self) -> tuple[bytes, str]:
        """An archive of those files, and its SHA-256."""
        return bundle(self.files)

    async def abort(self, name: str) -> int:
        """Abort a request in any worker of the gateway. Returns the number of its running generations."""
        return await abort_everywhere(self.generator, self.facts.peers, name)
