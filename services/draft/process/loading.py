"""Builds drafters with a model: checkpoint, weights, KV cache, runner, drafter."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from outrider.checkpoints import checkpoint
from outrider.checkpoints.conversion import cache_folder
from outrider.config import DraftConfig
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureFormat
from outrider.speculation.shape import TreeShape
from outrider.wire.v1 import common_pb2
from services.draft.drafters.block import BlockDrafter
from services.draft.drafters.feature import GROWTHS, FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.drafters.on_demand import OnDemandDrafter
from services.draft.drafters.shared_weights import Arrays, Install, Shapes, SharedWeights
from services.draft.drafters.stacked import StackedDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import read_target
from services.draft.kernels.base import Paging
from services.draft.kernels.cpu.panels import PanelMaker
from services.draft.model.layers.heads import BlockHead, ParallelHead
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.matrices.packed import pack_params
from services.draft.model.matrices.quantized import INT4
from services.draft.model.parallel.devices import bytes_a_device, choose_devices, dtype_of, pages_that_fit
from services.draft.model.programs.runner import ModelRunner
from services.draft.online.options import options_of
from services.draft.online.swap import WeightFormat
from services.draft.process.checkpoints import describe_model, draft_folder, read_draft, vocab_limit, with_map_of
from services.draft.process.flags import tree_shape
from services.draft.process.program_cache import cache_programs
from services.draft.process.weights import choose_backend, chosen_quantization, place_weights
from services.draft.sessions.features import dtype_of_rows

if TYPE_CHECKING:
    from services.draft.online.setup import OnlineSetup

log = logging.getLogger(__name__)

_FEATURES = {
    "auto": FeatureFormat.BFLOAT16, "bfloat16": FeatureFormat.BFLOAT16, "float32": FeatureFormat.FLOAT32,
    "float8_e4m3": FeatureFormat.FLOAT8_E4M3,
}  # fmt: skip
# Prompt tokens of a step: on CPUs its cost grows with every token, and short steps let other sessions wait less.
_CHUNK = {"cpu": 64}
_DEFAULT_CHUNK = 256
# Adaptive trees that one program grows on CPUs: those of a single session. A target that waits goes on with the first
# answer, which would be the root's children alone.
_CPU_GROWTHS = GROWTHS[:1]
# Sessions whose explicit trees one program grows on an accelerator.
_TREE_SESSIONS = (1, 4, 16)


def load_model_drafter(
    config: DraftConfig, shape: TreeShape | None, children: int
) -> tuple[ModelDrafter, common_pb2.ModelInfo]:
    """The drafter, and the facts of its model. Raises ConfigError.

    shape: of explicit trees; children: candidates a node of adaptive ones
    """
    devices = choose_devices(config.draft_device, config.draft_tp_size, share=config.draft_memory_bytes)
    cache_programs(cache_folder() / "xla")
    origin = draft_folder(config)
    folder, draft, vocabulary, online = _read(origin, config)
    facts = describe_model(folder, vocabulary, config, draft.config, dtype_of(config, devices[0])[1])
    draft = with_map_of(config, draft, origin)
    runner, prefix = _runner(draft, vocabulary, config, devices, shape.topk if shape else children, online)
    drafter = _drafter(draft, config, runner, prefix, _CHUNK.get(devices[0].platform, _DEFAULT_CHUNK), online)
    if shapes := draft.shared if online is None else online.shared:
        drafter.shared_weights = _shared_weights(drafter, shapes, origin, config, devices, online)
    if config.precompile_bs_paddings is not None:
        drafter.set_batch_sizes(config.precompile_bs_paddings)
    if isinstance(drafter, FeatureDrafter):
        _set_growth(drafter, config, shape, on_cpu=devices[0].platform == "cpu")
    if shape is not None:
        drafter.set_tree_shape(shape)
    allocator = prefix.allocator
    log.info(
        "%s, %s on %s, %d pages of %d tokens", draft.config.architecture, facts.dtype, ", ".join(map(str, devices)),
        allocator.total_pages, allocator.page_size,
    )  # fmt: skip
    return drafter, facts


def _set_growth(drafter: FeatureDrafter, config: DraftConfig, shape: TreeShape | None, *, on_cpu: bool) -> None:
    """How a head grows trees: in which programs, and whether ahead of the target's features."""
    if not on_cpu:
        drafter.tree_sessions = _TREE_SESSIONS
    if shape is not None:
        return
    drafter.set_growth(_CPU_GROWTHS if on_cpu else GROWTHS)
    if config.draft_ahead == "off" and drafter.grows_in_programs:
        drafter.wait_for_features()
    elif config.draft_ahead == "off" and not drafter.one_pass:
        log.warning("--draft-ahead off has no effect: several MTP layers draft from the target's features alone")


def _read(origin: Path, config: DraftConfig) -> tuple[Path, DraftCheckpoint, Path, OnlineSetup | None]:
    """The served folder, its checkpoint, the folder of its tokenizer, and its online training, if enabled."""
    options = options_of(config)
    if options is None:
        return origin, *read_draft(origin, config), None
    from services.draft.online.setup import OnlineSetup, folder_to_serve

    folder = folder_to_serve(origin, options.output)
    draft, target = read_draft(folder, config)
    first = draft if folder == origin else read_draft(origin, config)[0]
    setup = OnlineSetup(options, folder, read_target(target), draft, origin, first)
    return folder, draft, target, setup


def _drafter(
    draft: DraftCheckpoint,
    config: DraftConfig,
    runner: ModelRunner,
    prefix: PrefixCache,
    chunk: int,
    online: OnlineSetup | None,
) -> ModelDrafter:
    """The drafter of a checkpoint."""
    name, max_running = config.speculative_algorithm, config.max_running_requests
    if draft.features is None and config.draft_ahead == "off" and tree_shape(config) is None:
        return OnDemandDrafter(runner, prefix, max_running, chunk)
    if draft.features is None:
        return StandaloneDrafter(runner, prefix, max_running, chunk)
    number_format = _FEATURES[config.draft_feature_dtype]
    if online is not None:
        from services.draft.online.drafter import OnlineDrafter

        features = online.head.states.in_format(number_format)
        share = online.options.share
        return OnlineDrafter(name, runner, prefix, max_running, chunk, features, online.learner(), online.buffer, share)
    block = isinstance(draft.config.head, BlockHead | ParallelHead)
    kind = BlockDrafter if block else StackedDrafter if draft.config.stacked else FeatureDrafter
    features = draft.features.in_format(number_format)
    return kind(name, runner, prefix, max_running, chunk, features, draft.fusion)


def _shared_weights(
    drafter: ModelDrafter,
    shapes: Shapes,
    origin: Path,
    config: DraftConfig,
    devices: list[jax.Device],
    online: OnlineSetup | None,
) -> SharedWeights:
    """How a drafter follows the target's weights. shapes: of those it shares; origin: folder of the draft's own."""
    assert config.model_path is not None
    dtype, _ = dtype_of(config, devices[0])
    backend = drafter.runner.backend
    quantization = chosen_quantization(config, backend)

    def read(folder: Path, replaced: Arrays) -> Install:
        draft, _ = read_draft(origin, config, folder, replaced)
        _, placed, _ = place_weights(with_map_of(config, draft, origin), dtype, quantization, devices)
        if online is not None:
            placed = online.untrained(placed)
        params = pack_params(placed, PanelMaker(int4=quantization == INT4)) if backend == "cpu" else placed
        fusion = None
        if online is not None:
            params, fusion = online.follow(params, replace(read_target(folder), replaced=replaced))

        def install() -> None:
            drafter.runner.install(params, fusion)
            drafter.prefix.flush()

        return install

    return SharedWeights(shapes, checkpoint.resolve(config.model_path), read)


def _runner(
    draft: DraftCheckpoint,
    vocabulary: Path,
    config: DraftConfig,
    devices: list[jax.Device],
    children: int,
    online: OnlineSetup | None,
) -> tuple[ModelRunner, PrefixCache]:
    dtype, _ = dtype_of(config, devices[0])
    page_size = config.draft_page_size
    backend = choose_backend(draft.config, config, devices, dtype)
    quantization = chosen_quantization(config, backend)
    model, params, placement = place_weights(draft, dtype, quantization, devices)
    if backend == "cpu":
        params = pack_params(params, PanelMaker(int4=quantization == INT4))
    fusion, fusion_params = None, None
    if online is not None:  # converted by the code that converts trained weights later, so that programs are reused
        weight_format = WeightFormat(dtype, quantization, panels=backend == "cpu")
        fusion, (params, fusion_params) = online.head.fusion, online.serve(params, weight_format)
    model = with_cache_for(model, backend)
    numbers = model.cache_numbers() if placement is None else placement.cache_numbers(model)
    token_bytes = numbers * jnp.dtype(dtype).itemsize
    total_pages = pages_that_fit(config, model.context, token_bytes, bytes_a_device(params), devices[0])
    context = min(model.context, total_pages * page_size)
    runner = ModelRunner(
        model,
        params,
        dtype=dtype,
        total_pages=total_pages,
        paging=Paging(page_size, backend),
        table_pages=-(-context // page_size),
        children=min(children, model.vocab_size),
        vocab_limit=vocab_limit(vocabulary),
        placement=placement,
        fusion=fusion,
        fusion_params=fusion_params,
        feature_dtype=dtype_of_rows(_FEATURES[config.draft_feature_dtype]),
    )
    return runner, PrefixCache(PageAllocator(total_pages, page_size), enabled=not config.disable_radix_cache)
