"""Real engines on tiny checkpoints, made as the services make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.config import DraftConfig, TargetConfig
from outrider.serving.loop import Engine


def target_engine(folder: Path, **options: Any) -> Engine:
    """A float32 target engine that verifies proposals at any cost, and returns after each step.

    options: device, page_size, max_step_tokens, max_total_tokens, max_running.
    """
    from services.target.engine.engine import TargetEngine
    from services.target.model.loading.load import load
    from services.target.speculation.modes.mode import DRAFT_MODES

    names = {"max_step_tokens": "chunked_prefill_size", "max_running": "max_running_requests"}
    flags = {"max_total_tokens": 4096} | {names.get(name, name): value for name, value in options.items()}
    flags = {"device": "cpu", "dtype": "float32", "coalesce_seconds": 0.0} | flags
    config = TargetConfig(model_path=str(folder), **flags)
    return TargetEngine(load(folder, config), config, DRAFT_MODES)


def as_on_cuda(engine: Any, *, prepares: bool) -> Any:
    """The target engine, with steps that overlap and are walked on the device. prepares: also behind draft tokens."""
    from services.target.speculation.modes.mode import SpeculationMode

    engine.overlap, engine.launcher.prepares = True, prepares
    sampler = engine.launcher.sampler
    sampler.alongside, sampler.walks, sampler.resamples = False, True, True
    if prepares:
        engine.speculation._modes = [SpeculationMode.DRAFT_IF_READY]
        engine.speculation.forget()
    return engine


def draft_engine(algorithm: str, folder: Path | None = None, target: Path | None = None, **options: Any) -> Engine:
    """A draft engine. target: the target's folder, for heads.

    options: match_type, max_running, beside, and flags; tree: steps, topk and draft tokens of explicit trees.
    """
    from services.draft.process.app import build

    names = {
        "match_type": "speculative_ngram_match_type",
        "max_running": "max_running_requests",
        "beside": "speculative_ngram_beside",
    }
    if tree := options.pop("tree", ()):
        flags = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        options |= dict(zip(flags, tree, strict=True))
    defaults = {"max_running": 8, "draft_max_total_tokens": 8192, "draft_dtype": "float32"}
    config = DraftConfig(
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(folder) if folder else None,
        model_path=str(target) if target else None,
        **{names.get(name, name): value for name, value in (defaults | options).items()},
    )
    engine, _ = build(config)
    for drafter in engine.drafters:
        drafter.warm_up()
    return engine
