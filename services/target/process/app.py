"""The target process: flags, CPU affinity, the port, then the model, then requests.

The port is bound before the model is loaded, so that a port in use is reported at once, and early clients are answered
that the service is loading. PyTorch is imported only after the CPU affinity is set.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.conversion import convert_when_asked
from outrider.checkpoints.gguf.record import read_record
from outrider.config import TargetConfig, check_device, parse_flags
from outrider.config.compatibility.on_cpu import for_cpu
from outrider.config.ranks import rank_places
from outrider.placement.shares import share_of_target
from outrider.process import process
from outrider.process.garbage_collection import imports_without_gc
from outrider.process.startup import STARTUP
from outrider.serving.loop import EngineLoop
from outrider.tracing import tracing_to
from outrider.transport.hang_watch import watch_engine
from outrider.transport.rpc import GrpcServer, serve_engine
from outrider.transport.stream import StreamHub
from outrider.wire.codec import verify_request_from_pb, verify_response_to_pb
from services.target.process.service import TargetServicer, describe

if TYPE_CHECKING:
    from services.target.engine.engine import TargetEngine
    from services.target.model.base import Model
    from services.target.process.kept_costs import KeptCosts

log = logging.getLogger(__name__)

_GRAMMARS_AFTER = 2.0  # seconds that a target serves before it prepares for grammars
_KEPT_AFTER = 1.0  # and before it writes packed weights to the disk


def _as_built(_: TargetEngine) -> None:
    pass


def main(argv: Sequence[str], prepare: Callable[[TargetEngine], None] = _as_built) -> int:
    """Run the service with flags. Returns the process's exit code; 2 for wrong flags, files or port.

    prepare: called with the engine after its warm-up, in the thread that builds it; benchmarks put their clocks there
    """
    config = parse_flags(TargetConfig, argv, "outrider target")
    return process.run("target", config, partial(serve, prepare=prepare), share_of_target)


async def serve(config: TargetConfig, prepare: Callable[[TargetEngine], None] = _as_built) -> int:
    """Serve until a signal or a fault. Returns the process's exit code. prepare: as of `main`. Raises ConfigError."""
    check_device(config.device)
    config.check()
    if config.node_rank > 0:
        return await _serve_ranks(config)
    servicers: list[TargetServicer] = []
    built: list[tuple[TargetEngine, KeptCosts]] = []
    tls, token = config.port_security(config.listen)

    def register(server: GrpcServer, hub: StreamHub[Any, Any], loop: EngineLoop) -> Sequence[str]:
        servicers.append(TargetServicer(hub, loop))
        STARTUP.on_progress = server.set_progress
        return servicers[0].register(server)

    def build() -> TargetEngine:
        STARTUP.done("Python and flags")
        with imports_without_gc():
            from services.target.model.dense.load import folder_of
            from services.target.process.control import Control
            from services.target.process.kept_costs import KeptCosts

        STARTUP.done("libraries")
        folder = folder_of(config)
        servicers[0].offer_tokenizer(folder)
        if (record := read_record(folder)) is not None:  # a draft service beside this one may need the weights
            convert_when_asked(record.file)
        STARTUP.done("checkpoint")
        kept = KeptCosts(folder, config)
        engine = build_engine(folder, config, kept)
        built.append((engine, kept))
        engine.observers.tracing = tracing
        control = Control(
            engine, folder, model_path=config.model_path, roots=config.weight_update_roots,
            trust_remote_code=config.trust_remote_code, group_timeout=config.weight_update_timeout,
        )  # fmt: skip
        servicers[0].serve(describe(folder, engine, config), engine, control)
        prepare(engine)
        STARTUP.done("handshake facts")
        return engine

    async def watch(loop: EngineLoop, server: GrpcServer) -> None:
        from services.target.process.kept_costs import measure_again

        ((engine, kept),) = built
        await asyncio.gather(
            watch_engine(loop, server, config.hang_timeout), measure_again(loop, engine, kept), _load_grammars(engine),
            _keep_packed_weights(),
        )  # fmt: skip

    with tracing_to(config.otlp_traces_endpoint, "target") as tracing:
        return await serve_engine(
            build, config.listen, verify_request_from_pb, verify_response_to_pb, register, tls=tls, token=token,
            drain=config.drain_timeout, watch=watch,
        )  # fmt: skip


async def _load_grammars(engine: TargetEngine) -> None:
    """Prepare for grammars once the gateway has connected: tokenizer and process would take the cores of the start."""
    await asyncio.sleep(_GRAMMARS_AFTER)
    engine.sessions.grammars.load()


async def _keep_packed_weights() -> None:
    """Write packed weights for the next start, in a thread at a low priority, once this start is over."""
    from services.target.kernels.cpu.matrices import packed_file

    await asyncio.sleep(_KEPT_AFTER)
    threading.Thread(target=packed_file.write_pending, name="packed weights", daemon=True).start()


async def _serve_ranks(config: TargetConfig) -> int:
    """Compute ranks for the target of another machine. Returns the exit code. Raises ConfigError."""
    with imports_without_gc():
        from services.target.process.ranks.further import serve_ranks

    return await serve_ranks(_for_device(config))


def build_engine(folder: Path, config: TargetConfig, kept: KeptCosts | None = None) -> TargetEngine:
    """Load a folder's model and warm up its engine. kept: as of warm_up. Raises ConfigError."""
    with imports_without_gc():
        from services.target.engine.engine import TargetEngine
        from services.target.engine.step_log import StepLog
        from services.target.process.warmup import warm_up

    STARTUP.done("libraries")
    config = _for_device(config)
    model = _load(folder, config)
    engine = TargetEngine(model, config)
    STARTUP.done("KV cache")
    warm_up(engine, kept)
    if log.isEnabledFor(logging.INFO):
        engine.observers.step_log = StepLog(engine.scheduler, config.decode_log_interval)
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


def _for_device(config: TargetConfig) -> TargetConfig:
    """The flags as the device can follow them; what is changed, or has no effect, is logged. Raises ConfigError."""
    with imports_without_gc():
        from services.target.kernels.device import pick_device

    if pick_device(rank_places(config).devices[0]).type != "cpu":
        return config
    config, notes = for_cpu(config)
    for note in notes:
        log.warning("%s", note)
    return config


def _load(folder: Path, config: TargetConfig) -> Model:
    if config.tp_size == 1:
        return _load_whole(folder, config)
    from services.target.process.ranks.processes import load_split

    model, ranks = load_split(folder, config, _exit_process)
    atexit.register(ranks.stop)
    return model


def _load_whole(folder: Path, config: TargetConfig) -> Model:
    with imports_without_gc():
        from services.target.kernels.device import pick_device
        from services.target.model.dense.load import load_dense

    STARTUP.done("libraries")
    if pick_device(config.device).type == "cpu" and (model := load_dense(folder, config)) is not None:
        return model
    with imports_without_gc():
        from services.target.model.loading.load import load

    STARTUP.done("libraries")
    return load(folder, config)


def _exit_process(why: str) -> None:
    """End the process at once, because the engine may be inside a step that cannot finish."""
    log.error("%s", why)
    os._exit(1)
