"""The process: flags, cores, the port, then the model, then requests.

The port is bound before the model is loaded, so that a port in use is said at once, and whoever connects early learns
that the service is on its way. PyTorch is imported only after the process has been put on its cores.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
import uvloop

from outrider import checkpoint
from outrider.config import TargetConfig, parse_cores
from outrider.errors import ConfigError
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.serving.rpc import GrpcServer, serve_engine
from outrider.serving.stream import StreamHub
from outrider.speculation.proposal import Commit, Proposal
from outrider.telemetry import setup_logging
from outrider.wire.codec import verify_request_from_pb, verify_response_to_pb
from services.target.service import TargetServicer, describe

if TYPE_CHECKING:
    from services.target.engine import TargetEngine

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service with flags. Returns the process's exit code; 2 for flags, files or a port that do not fit."""
    config = tyro.cli(TargetConfig, args=argv, prog="outrider target")
    setup_logging("target", config.log_level)
    try:
        take_cores(config.cores)
        return uvloop.run(serve(config))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130


def take_cores(cores: str | None) -> None:
    """Put the process on its cores, with as many threads. Raises ConfigError for cores that the machine lacks."""
    if cores is None:
        return
    wanted = parse_cores(cores)
    missing = sorted(set(wanted) - os.sched_getaffinity(0))
    if missing or not wanted:
        raise ConfigError(f"--cores {cores}: this process may not use core {missing[0] if missing else cores}")
    os.sched_setaffinity(0, wanted)
    import torch

    torch.set_num_threads(len(wanted))


class LateEngine(Engine):
    """An engine that is built when the service starts up, behind the port that is bound already."""

    def __init__(self) -> None:
        self.engine: TargetEngine | None = None

    @property
    def _built(self) -> TargetEngine:
        assert self.engine is not None, "the engine loop starts after the model is loaded"
        return self.engine

    def open(self, request: OpenSession) -> None:
        """As in TargetEngine."""
        self._built.open(request)

    def close(self, session_id: int) -> None:
        """As in TargetEngine."""
        self._built.close(session_id)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """As in TargetEngine."""
        self._built.receive(proposals, commits)

    @property
    def idle(self) -> bool:
        """As in TargetEngine."""
        return self._built.idle

    def step(self) -> StepOutput:
        """As in TargetEngine."""
        return self._built.step()

    def load(self) -> EngineLoad:
        """As in TargetEngine."""
        return self._built.load()

    def check(self) -> None:
        """As in TargetEngine."""
        self._built.check()


async def serve(config: TargetConfig) -> int:
    """Serve until a signal or a fault. Returns the process's exit code. Raises ConfigError."""
    late = LateEngine()
    servicers: list[TargetServicer] = []

    def register(server: GrpcServer, hub: StreamHub[Any, Any]) -> Sequence[str]:
        servicers.append(TargetServicer(hub))
        return servicers[0].register(server)

    def start_up() -> None:
        folder = checkpoint.resolve(config.model_path)
        late.engine = build_engine(folder, config)
        servicers[0].facts = describe(folder, late.engine, config)

    return await serve_engine(late, config.listen, verify_request_from_pb, verify_response_to_pb, register, start_up)


def build_engine(folder: Path, config: TargetConfig) -> TargetEngine:
    """Load a folder's model and warm its engine up. Raises ConfigError."""
    from services.target.engine import TargetEngine
    from services.target.model.load import load

    engine = TargetEngine(load(folder, config), config)
    engine.warm_up()
    model = engine.model
    log.info(
        "%s, %s on %s, %d pages of %d tokens",
        model.architecture,
        str(model.dtype).removeprefix("torch."),
        model.device,
        engine.scheduler.allocator.total_pages,
        config.page_size,
    )
    return engine
