"""The life of the process: flags, CPU affinity, the listener, then the drafters and their warm-up, then requests.

JAX is imported after the CPU affinity was set, and never for NGRAM.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import outrider
from outrider.checkpoints import checkpoint
from outrider.config import DraftConfig, parse_cores, parse_flags
from outrider.drafts import resolve_drafter
from outrider.placement.shares import share_of_draft
from outrider.process import process
from outrider.process.startup import STARTUP
from outrider.serving.loop import EngineLoop
from outrider.tracing import tracing_to
from outrider.transport.hang_watch import watch_engine
from outrider.transport.rpc import GrpcServer, serve_engine
from outrider.transport.stream import StreamHub
from outrider.wire.codec import propose_request_from_pb, propose_response_to_pb
from outrider.wire.features import feature_spec_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2
from services.draft.drafters.base import Drafter
from services.draft.drafters.ngram import NgramDrafter, store
from services.draft.engine.engine import DraftEngine
from services.draft.ngrams.corpus import read_corpus
from services.draft.process.attempts import load_with_retries
from services.draft.process.flags import MODEL_CHILDREN, check, ngram_options, tree_limits, tree_shape, uses_ngram
from services.draft.process.service import DraftServicer

log = logging.getLogger(__name__)


def _as_built(_: DraftEngine) -> None:
    pass


def main(argv: Sequence[str], prepare: Callable[[DraftEngine], None] = _as_built) -> int:
    """Run the service with command-line flags. Returns the exit code; 2 for invalid flags or a used port.

    A draft that cannot be loaded is tried again; with --require-draft it gives code 2.

    prepare: called with the engine after its warm-up, in the thread that builds it; benchmarks put their clocks there
    """
    config = parse_flags(DraftConfig, argv, "outrider draft")
    _collect_rarely()
    return process.run("draft", config, partial(serve, prepare=prepare), share_of_draft)


def _collect_rarely() -> None:
    # The trie's millions of nodes live long, and evicted ones are in no cycles, but the garbage collector would visit
    # all of them repeatedly: with Python's default thresholds, storing a prompt takes ten times as long.
    gc.set_threshold(50_000, 20, 1000)


async def serve(config: DraftConfig, prepare: Callable[[DraftEngine], None] = _as_built) -> int:
    """Serve until a signal or a fault. Returns the exit code. prepare: as of `main`. Raises ConfigError."""
    config = resolve_drafter(config, config.model_path)
    check(config)
    tls, token = config.port_security(config.listen)
    servicers: list[DraftServicer] = []
    servers: list[GrpcServer] = []
    drafters: list[Drafter] = []

    def register(server: GrpcServer, hub: StreamHub[Any, Any], loop: EngineLoop) -> Sequence[str]:
        servers.append(server)
        servicers.append(DraftServicer(hub, loop))
        return servicers[0].register(server)

    def report(reason: str) -> None:
        servicers[0].failed(reason)
        servers[0].set_progress(f"cannot be loaded: {reason}")

    def build_engine() -> DraftEngine:
        return build_once() if config.require_draft else load_with_retries(build_once, report)

    def build_once() -> DraftEngine:
        STARTUP.done("Python and flags")
        servers[0].set_progress("loading")
        engine, model = build(config)
        STARTUP.done("loading")
        for drafter in engine.drafters:
            drafter.warm_up(lambda part, parts: servers[0].set_progress(f"compiling {part}/{parts}"))
        STARTUP.done("warm-up")
        servicers[0].serve(describe(engine, model), engine)
        drafters.extend(engine.drafters)
        for drafter in drafters:
            drafter.start()
        engine.tracing = tracing
        prepare(engine)
        return engine

    try:
        coders = propose_request_from_pb, propose_response_to_pb
        network = None if config.network_cores is None else parse_cores(config.network_cores)
        with tracing_to(config.otlp_traces_endpoint, "draft") as tracing:
            watch = partial(watch_engine, limit=config.hang_timeout)
            return await serve_engine(
                build_engine, config.listen, *coders, register, network, tls=tls, token=token, watch=watch
            )
    finally:
        for drafter in drafters:
            drafter.stop()


def describe(engine: DraftEngine, model: common_pb2.ModelInfo | None) -> draft_pb2.GetDraftInfoResponse:
    """Facts for the handshake."""
    features, shared = engine.drafter.features, engine.drafter.shared_weights
    return draft_pb2.GetDraftInfoResponse(
        protocol_version=outrider.PROTOCOL_VERSION,
        software_version=outrider.__version__,
        drafters=[drafter.name for drafter in engine.drafters],
        model=model,
        max_session_tokens=engine.drafter.max_session_tokens,
        max_running_sessions=engine.max_running,
        features=feature_spec_to_pb(features, engine.drafter.fusion) if features is not None else None,
        shared_tensors=sorted(shared.shapes) if shared is not None else (),
    )


def build(config: DraftConfig) -> tuple[DraftEngine, common_pb2.ModelInfo | None]:
    """The engine of a configuration before its warm-up, and the facts of its model. Raises ConfigError."""
    config = resolve_drafter(config, config.model_path)
    check(config)
    drafter: Drafter
    model = None
    ngram = build_ngram(config) if uses_ngram(config) else None
    if config.speculative_algorithm == "NGRAM":
        assert ngram is not None
        if config.speculative_token_map is not None:
            log.warning("--speculative-token-map is ignored: NGRAM has no head")
        drafter, ngram = ngram, None
    else:
        from services.draft.process.loading import load_model_drafter

        drafter, model = load_model_drafter(config, tree_shape(config), MODEL_CHILDREN)
    return DraftEngine(drafter, tree_limits(config), config.max_running_requests, beside=ngram), model


def build_ngram(config: DraftConfig) -> NgramDrafter:
    """The NGRAM drafter, with its corpus if there is one. Raises ConfigError."""
    options = ngram_options(config)
    if config.speculative_ngram_external_corpus_path is None:
        return NgramDrafter(options)
    assert config.model_path is not None, "flags.check requires it"
    budget = config.speculative_ngram_external_sam_budget
    corpus = store(replace(options, draft_token_num=budget + 1))
    path, folder = Path(config.speculative_ngram_external_corpus_path), checkpoint.resolve(config.model_path)
    max_tokens = config.speculative_ngram_external_corpus_max_tokens
    read_corpus(path, folder, corpus, options.capacity, max_tokens)
    own = replace(options, draft_token_num=options.draft_token_num - budget)
    return NgramDrafter(options, store(own), corpus)
