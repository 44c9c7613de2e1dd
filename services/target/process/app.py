"""The process: flags, cores, the port, then the model, then requests.

The port is bound before the model is loaded, so that a port in use is said at once, and whoever connects early learns
that the service is on its way. PyTorch is imported only after the process has been put on its cores.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig, parse_flags
from outrider.placement.shares import share_of_target
from outrider.process import process
from outrider.process.garbage_collection import imports_without_gc
from outrider.serving.loop import EngineLoop
from outrider.tracing import tracing_to
from outrider.transport.rpc import GrpcServer, serve_engine
from outrider.transport.stream import StreamHub
from outrider.wire.codec import verify_request_from_pb, verify_response_to_pb
from services.target.process.service import TargetServicer, describe

if TYPE_CHECKING:
    from services.target.engine.engine import TargetEngine
    from services.target.model.base import Model

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service with flags. Returns the process's exit code; 2 for flags, files or a port that do not fit."""
    config = parse_flags(TargetConfig, argv, "outrider target")
    return process.run("target", config, serve, share_of_target)


async def serve(config: TargetConfig) -> int:
    """Serve until a signal or a fault. Returns the process's exit code. Raises ConfigError."""
    servicers: list[TargetServicer] = []
    tls = config.server_tls()

    def register(server: GrpcServer, hub: StreamHub[Any, Any], loop: EngineLoop) -> Sequence[str]:
        servicers.append(TargetServicer(hub, loop))
        return servicers[0].register(server)

    def build() -> TargetEngine:
        with imports_without_gc():
            from services.target.process.control import Control

        folder = checkpoint.resolve(config.model_path)
        engine = build_engine(folder, config)
        engine.tracing = tracing
        control = Control(engine, folder, trust_remote_code=config.trust_remote_code)
        servicers[0].serve(describe(folder, engine, config), engine, control)
        return engine

    with tracing_to(config.otlp_traces_endpoint, "target") as tracing:
        return await serve_engine(
            build, config.listen, verify_request_from_pb, verify_response_to_pb, register, tls=tls
        )


def build_engine(folder: Path, config: TargetConfig) -> TargetEngine:
    """Load a folder's model and warm its engine up. Raises ConfigError."""
    with imports_without_gc():
        from services.target.engine.engine import TargetEngine
        from services.target.process.warmup import warm_up

    engine = TargetEngine(_load(folder, config), config)
    warm_up(engine)
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


def _load(folder: Path, config: TargetConfig) -> Model:
    if config.tp_size == 1:
        with imports_without_gc():
            from services.target.model.loading.load import load

        return load(folder, config)
    from services.target.process.tensor_parallel import load_split

    model, followers = load_split(folder, config, _die)
    atexit.register(followers.stop)
    return model


def _die(why: str) -> None:
    """End the process at once: the engine may be in the midst of a step that cannot end."""
    log.error("%s", why)
    os._exit(1)
