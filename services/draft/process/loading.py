"""Builds drafters with a model: device, number format, cache size, weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from outrider.checkpoints import checkpoint
from outrider.config import BUILT_IN_ALGORITHMS, FED_ALGORITHMS, DraftConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureFormat
from outrider.speculation.shape import TreeShape
from outrider.wire.v1 import common_pb2
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.drafters.sharing import Sharing
from services.draft.drafters.stacked import StackedDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.formats.base import Draft
from services.draft.formats.decoders import read_decoder
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.mtp import holds_mtp, read_mtp
from services.draft.formats.target import read_target
from services.draft.formats.token_map import read_token_map, with_token_map
from services.draft.kernels.base import Backend, Paging
from services.draft.model.layers.backend import choose
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.heads import Params
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.matrices.narrow import check_quantization, in_panels, narrow, narrows
from services.draft.model.parallel.devices import bytes_a_device, choose_devices, dtype_of, host_device, pages_that_fit
from services.draft.model.parallel.mesh import Spread, spread_over
from services.draft.model.programs.runner import ModelRunner
from services.draft.online.options import options_of
from services.draft.online.swap import Form

if TYPE_CHECKING:
    from services.draft.online.loading import Teaching

log = logging.getLogger(__name__)

_FEATURES = {
    "auto": FeatureFormat.BFLOAT16, "bfloat16": FeatureFormat.BFLOAT16, "float32": FeatureFormat.FLOAT32,
    "float8_e4m3": FeatureFormat.FLOAT8_E4M3,
}  # fmt: skip
_HEADS = {"EAGLE": read_eagle, "EAGLE3": read_eagle3}
# Tokens of a prompt a step: on a CPU, whose cost grows with every token, short steps keep the others waiting less.
_CHUNK = {"cpu": 64}
_DEFAULT_CHUNK = 256


def load_model_drafter(
    config: DraftConfig, shape: TreeShape | None, children: int
) -> tuple[ModelDrafter, common_pb2.ModelInfo]:
    """The drafter and the facts of its model. Raises ConfigError.

    shape: of explicit trees; children: candidates a node where there is none
    """
    check_quantization(config.speculative_draft_model_quantization)
    devices = choose_devices(config.draft_device, config.draft_tp_size)
    _keep_programs()
    origin = checkpoint.resolve(_path(config), torch_files=True)
    folder, draft, vocabulary, teaching = _read_to_teach(origin, config)
    facts = _describe(folder, vocabulary, config, draft.config, dtype_of(config, devices[0])[1])
    if config.speculative_token_map is not None:
        draft = _mapped(draft, config.speculative_token_map, config.speculative_algorithm)
    runner, prefix = _runner(draft, vocabulary, config, devices, shape.topk if shape else children, teaching)
    chunk = _CHUNK.get(devices[0].platform, _DEFAULT_CHUNK)
    drafter: ModelDrafter
    if teaching is not None:
        drafter = _online(config, runner, prefix, chunk, teaching)
    elif draft.features is None:
        drafter = StandaloneDrafter(runner, prefix, config.max_running_requests, chunk)
    else:
        features = draft.features.in_format(_FEATURES[config.draft_feature_dtype])
        kind = StackedDrafter if draft.config.stacked else FeatureDrafter
        drafter = kind(
            config.speculative_algorithm, runner, prefix, config.max_running_requests, chunk, features, draft.fusion
        )
    if draft.shares and teaching is None:
        drafter.sharing = _sharing(drafter, origin, config, devices)
    if shape is not None:
        drafter.follow(shape)
    allocator = prefix.allocator
    log.info(
        "%s, %s on %s, %d pages of %d tokens", draft.config.architecture, facts.dtype, ", ".join(map(str, devices)),
        allocator.total_pages, allocator.page_size,
    )  # fmt: skip
    return drafter, facts


def _sharing(drafter: ModelDrafter, origin: Path, config: DraftConfig, devices: list[jax.Device]) -> Sharing:
    """How a drafter takes what it shares from another folder of its target. origin: the draft's own folder."""
    assert config.model_path is not None
    dtype, _ = dtype_of(config, devices[0])
    backend = drafter.runner.backend
    quantization = chosen_quantization(config, backend)

    def load(folder: Path) -> Params:
        draft, _ = _read(origin, config, folder)
        if config.speculative_token_map is not None:
            draft = _mapped(draft, config.speculative_token_map, config.speculative_algorithm)
        _, params, _ = _placed(draft, dtype, quantization, devices)
        return in_panels(params) if backend == "cpu" else params

    return Sharing(drafter, checkpoint.resolve(config.model_path), load)


def _read_to_teach(origin: Path, config: DraftConfig) -> tuple[Path, Draft, Path, Teaching | None]:
    """The folder that is served, what is read of it, whose tokenizer it uses, and how it learns, if it does."""
    options = options_of(config)
    if options is None:
        return origin, *_read(origin, config), None
    from services.draft.online.loading import Teaching, folder_to_serve

    folder = folder_to_serve(origin, options.output)
    draft, target = _read(folder, config)
    return folder, draft, target, Teaching(options, folder, read_target(target), draft, checkpoint.fingerprint(origin))


def _online(
    config: DraftConfig, runner: ModelRunner, prefix: PrefixCache, chunk: int, teaching: Teaching
) -> ModelDrafter:
    from services.draft.online.drafter import OnlineDrafter

    features = teaching.head.states.in_format(_FEATURES[config.draft_feature_dtype])
    return OnlineDrafter(
        config.speculative_algorithm, runner, prefix, config.max_running_requests, chunk, features,
        teaching.learner(), teaching.ring, teaching.options.share,
    )  # fmt: skip


def _mapped(draft: Draft, token_map: str, algorithm: str) -> Draft:
    if algorithm == "EAGLE3":
        log.warning("--speculative-token-map is ignored: an EAGLE-3 head has a vocabulary of its own")
        return draft
    whole = draft.config.vocab_size
    ids = read_token_map(token_map, whole)
    log.info("the draft proposes %d of %d tokens", len(ids), whole)
    return with_token_map(draft, ids)


def _path(config: DraftConfig) -> str:
    """Where the draft model is: in the target's own checkpoint unless it is named."""
    path = config.speculative_draft_model_path or config.model_path
    assert path is not None, "app.check refuses a drafter whose model is not named"
    return path


def _read(folder: Path, config: DraftConfig, shared: Path | None = None) -> tuple[Draft, Path]:
    """The draft model, and the folder whose tokenizer it uses. shared: where embedding and head of the target are."""
    if config.speculative_algorithm not in FED_ALGORITHMS:
        return read_decoder(folder), folder
    assert config.model_path is not None
    target = checkpoint.resolve(config.model_path)
    algorithm, facts = config.speculative_algorithm, read_target(target)
    if shared is not None:
        facts = replace(facts, folder=shared)
    if algorithm == "NEXTN" or (algorithm in BUILT_IN_ALGORITHMS and (folder == target or holds_mtp(folder))):
        states = config.speculative_mtp_feature, config.speculative_mtp_own_state
        draft = read_mtp(folder, facts, feature=states[0], own=states[1], several=config.enable_multi_layer_eagle)
        _check_steps(config, draft)
        return draft, target
    return _HEADS[algorithm](folder, facts), target


def _check_steps(config: DraftConfig, draft: Draft) -> None:
    """Raise ConfigError for a depth that is not that of a stack of MTP layers."""
    steps, layers = config.speculative_num_steps, len(draft.config.layers)
    if draft.config.stacked and steps not in (None, layers):
        raise ConfigError(
            f"--speculative-num-steps {steps} does not fit {layers} MTP layers that predict one token further each; "
            f"leave it out, or say {layers}"
        )


def _runner(
    draft: Draft,
    vocabulary: Path,
    config: DraftConfig,
    devices: list[jax.Device],
    children: int,
    teaching: Teaching | None,
) -> tuple[ModelRunner, PrefixCache]:
    dtype, _ = dtype_of(config, devices[0])
    page_size = config.draft_page_size
    backend = _backend(draft.config, config, devices, dtype)
    quantization = chosen_quantization(config, backend)
    model, params, spread = _placed(draft, dtype, quantization, devices)
    if backend == "cpu":
        params = in_panels(params)
    fusion, fusion_params = None, None
    if teaching is not None:  # weights that can be made again, just so
        form = Form(dtype, quantization, panels=backend == "cpu")
        fusion, (params, fusion_params) = teaching.head.fusion, teaching.serve(params, form)
    model = with_cache_for(model, backend)
    numbers = model.cache_numbers() if spread is None else spread.cache_numbers(model)
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
        spread=spread,
        fusion=fusion,
        fusion_params=fusion_params,
    )
    return runner, PrefixCache(PageAllocator(total_pages, page_size), enabled=not config.disable_radix_cache)


def chosen_quantization(config: DraftConfig, backend: Backend) -> str | None:
    """What the flag says, and else 8 bits for the head that comes along, where kernels read them in half the time."""
    said = config.speculative_draft_model_quantization
    comes_along = config.speculative_draft_model_path == str(DEFAULT_HEAD)
    return "int8" if said is None and comes_along and backend == "cpu" else said


def _backend(model: ModelConfig, config: DraftConfig, devices: list[jax.Device], dtype: Any) -> Backend:
    wanted = config.draft_attention_backend
    if len(devices) > 1 and devices[0].platform == "cpu":  # the compiled kernels know the whole machine alone
        if wanted == "cpu":
            raise ConfigError("--draft-attention-backend cpu uses all cores for one device; leave out --draft-tp-size")
        wanted = "plain"
    return choose(wanted, devices[0], model, dtype, config.draft_page_size)


def _placed(
    draft: Draft, dtype: Any, quantization: str | None, devices: list[jax.Device]
) -> tuple[ModelConfig, Params, Spread | None]:
    """A device's part of the model, and the parameters on the devices.

    What is narrowed or split is loaded in the host's memory, so that the devices never hold more than in the end.
    """
    if len(devices) == 1 and narrows(quantization) is None:
        return draft.config, draft.load(dtype), None
    with jax.default_device(host_device()):
        params = narrow(draft.load(dtype), quantization)
    if len(devices) > 1:
        return spread_over(devices, draft.config, params)
    return draft.config, jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), params), None


def _keep_programs() -> None:
    """Keep compiled programs beside the converted models, so that the next start-up finds them."""
    jax.config.update("jax_compilation_cache_dir", str(checkpoint.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def vocab_limit(folder: Path) -> int:
    """Ids from here on are padding of the embedding, which a target with the same tokenizer may lack."""
    return max(checkpoint.vocabulary(folder).values(), default=2**31 - 2) + 1


def _describe(
    folder: Path, vocabulary: Path, config: DraftConfig, model: ModelConfig, dtype: str
) -> common_pb2.ModelInfo:
    fed = model.head.fed
    return common_pb2.ModelInfo(
        model_path=checkpoint.display_name(_path(config)),
        fingerprint=checkpoint.fingerprint(folder),
        architecture=model.architecture,
        # A fed head's own vocabulary, if it has one, is translated before anybody sees it.
        vocab_size=read_target(vocabulary).vocab_size if fed else model.vocab_size,
        vocab_hash=checkpoint.vocab_hash(vocabulary),
        context_length=model.context,
        dtype=dtype,
    )
