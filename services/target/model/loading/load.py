"""Loading a model: any causal LM of `transformers` that uses its attention interface.

The folder's tensors must be exactly those of the model; a missing one is an error, because it would be random. A folder
that describes a GGUF file has none: a compiled program takes them from the file itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.checkpoints import checkpoint
from outrider.checkpoints.gguf.record import GgufRecord, read_record
from outrider.checkpoints.headers import some_names
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.process.startup import STARTUP
from services.target.kernels.device import pick_device, pick_dtype
from services.target.kernels.dispatch import choose
from services.target.kernels.pools import pick_cache_dtype
from services.target.model import attention, latent, native
from services.target.model.base import Model
from services.target.model.deterministic import selection as deterministic
from services.target.model.deterministic.batch_invariance import check as check_batch_invariance
from services.target.model.gguf.weights import open_gguf
from services.target.model.loading import positions, quantized, self_check, shards, support
from services.target.model.loading.probe import (
    check_window,
    make_rotary_buffers,
    module_without_weights,
    pass_a_token,
)
from services.target.model.loading.runners import choose_runner
from services.target.model.loading.weight_quantization import (
    quantization_arguments,
    quantize_loaded,
    warn_about_experts,
)
from services.target.model.parallel import split as parallel
from services.target.model.stored.checkpoint import QuantizedWeights, supports
from services.target.model.stored.source import WeightSource

log = logging.getLogger(__name__)


def reason_to_convert(folder: Path, config: TargetConfig, device: torch.device) -> str | None:
    """Why a model does not run as a compiled program; None if it does. folder: the description of a GGUF file."""
    settings, _ = support.read_settings(folder, config.trust_remote_code)
    if not native.serves(settings):
        return f"there is no compiled program for models of type {settings.model_type} here"
    dtype = pick_dtype(config.dtype, settings, device, compiled=True)
    module = module_without_weights(settings, dtype)
    return native.unsupported_reason(
        module, config.attention_backend, pick_cache_dtype(config.kv_cache_dtype, dtype, device)
    )


def load(folder: Path, config: TargetConfig) -> Model:
    """Load a model from a folder. Raises ConfigError if the folder, the flags or the machine do not fit.

    folder: a checkpoint, or the description of a GGUF file without a `reason_to_convert`
    """
    device = pick_device(config.device)
    planner = choose(config.attention_backend, device, ordered=config.deterministic)
    if config.deterministic:
        deterministic.check_flags(config, device)
    record = read_record(folder)
    if record is None:
        checkpoint.weight_files(folder)  # raises for missing files
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    settings, remote = support.read_settings(folder, config.trust_remote_code)
    positions.stretch(settings.get_text_config(), config.context_length)
    how = quantization_arguments(config.quantization, settings, device, config.tp_size)
    dtype = pick_dtype(config.dtype, settings, device, compiled=native.serves(settings))
    STARTUP.done("settings")
    source, module = _open_weights(folder, record, settings, dtype, config, device)
    if source is None:
        how |= shards.split(folder, settings, config.tp_size) | quantized.prepare(settings, device, config.tp_size)
        module = _read_weights(folder, settings, dtype, remote, how)
    STARTUP.done("reading weights")
    if config.tp_size > 1:
        parallel.install(module)
        shards.warn_about_copies(module)
    module.to(device if source is None else "meta").eval().requires_grad_(False)
    if config.tp_size > 1 and device.type == "cuda":
        quantize_loaded(config.quantization, module)
    warn_about_experts(config.quantization, module)
    vocab_size = parallel.whole_rows(module, module.get_output_embeddings())
    support.check_vocabulary(folder, vocab_size)
    latent.install(module)
    probe = pass_a_token(module, module.device)
    assert probe.dtype is not None
    if source is not None:
        make_rotary_buffers(module)
    cache_dtype = pick_cache_dtype(config.kv_cache_dtype, probe.dtype, device)
    context_length = positions.context_length(module.config.get_text_config(), config.context_length)
    check_window(module, probe, context_length)
    STARTUP.done("checks")
    origin = None if source is None else native.origin_of(folder, record)
    runner = choose_runner(module, how, probe, planner, cache_dtype, context_length, config, device, source, origin)
    STARTUP.done("packing weights")
    program = runner if isinstance(runner, native.ProgramRunner) else None
    model = Model(
        runner=runner,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        architecture=type(module).__name__,
        vocab_size=vocab_size,
        hidden_size=module.config.get_text_config().hidden_size,
        context_length=context_length,
        eos_token_ids=_eos_token_ids(module, folder, vocab_size),
        shapes=tuple(probe.shapes[layer] for layer in range(len(probe.shapes))),
        tokenizer_file=file if (file := folder / "tokenizer.json").is_file() else None,
        copied=program is not None and program.copied,
        head=None if program is None else program.head,
        prompt_lookup=program is not None and program.prompt_lookup,
        kinds={} if program is None else program.kinds,
        step_bytes=0 if program is None else program.weight_bytes,
        mapped_bytes=0 if program is None else program.mapped_bytes,
    )
    self_check.check(model)
    if config.deterministic:
        check_batch_invariance(model)
    STARTUP.done("checks")
    return model


def _open_weights(
    folder: Path, record: GgufRecord | None, settings: Any, dtype: torch.dtype, config: TargetConfig,
    device: torch.device,
) -> tuple[WeightSource | None, Any]:  # fmt: skip
    """The weights of a compiled program that are read from their file, and the model without any.

    No source for plain checkpoints, and for quantized ones whose weights no format of the kernels holds: these are
    loaded by `transformers`. record: of a GGUF file. A file's formats are kept unless flags ask for others.
    """
    kept = config.dtype == "auto" and config.quantization is None
    if record is not None:
        module = module_without_weights(settings, dtype)
        return open_gguf(record, module, config), module
    stored = quantized.settings_of(settings)
    runs_here = device.type == "cpu" and config.tp_size == 1 and not config.enable_torch_compile
    if not (kept and runs_here and native.serves(settings)) or stored is None or not supports(stored):
        return None, None
    module = module_without_weights(settings, dtype)
    cache_dtype = pick_cache_dtype(config.kv_cache_dtype, dtype, device)
    if native.unsupported_reason(module, config.attention_backend, cache_dtype) is not None:
        return None, None
    source = QuantizedWeights(folder, module, stored)
    if not source.kinds or not source.complete():
        log.info("no number format of the kernels holds the %s weights", stored["quant_method"])
        return None, None
    log.info("reading %s", folder)
    return source, module


def _read_weights(folder: Path, settings: Any, dtype: torch.dtype, remote: bool, how: dict[str, Any]) -> Any:
    log.info("loading %s as %s", folder, str(dtype).removeprefix("torch."))
    try:
        module, report = support.auto_class(settings).from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            attn_implementation=attention.registered(),
            trust_remote_code=remote,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            **how,
        )
    except Exception as error:
        reason = support.first_line(error)
        if isinstance(error, KeyError) and error.args == (
            attention.NAME,
        ):  # the model's code has its own table of attention functions
            reason = (
                f"{settings.model_type} does not use the attention interface of transformers, so it cannot be served "
                "from a paged cache; choose another model"
            )
        raise ConfigError(f"{folder} cannot be loaded: {reason}") from error
    if report["missing_keys"]:
        raise ConfigError(
            f"{folder} lacks tensors that the model needs: {_names(report['missing_keys'])}; get it whole"
        )
    if report["mismatched_keys"]:
        raise ConfigError(f"{folder} has tensors of the wrong shape: {_names(report['mismatched_keys'])}")
    spare = support.unexpected(report["unexpected_keys"], settings)
    support.check_spare(folder, spare)
    if spare:
        log.warning("%s has tensors that the model does not use: %s", folder, _names(spare))
    return module


def _eos_token_ids(module: Any, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of the model and of its tokenizer."""
    stated = [
        getattr(source, "eos_token_id", None)
        for source in (getattr(module, "generation_config", None), module.config.get_text_config())
    ]
    own = next((one for one in stated if one is not None), None)
    return support.known_ids(own, support.tokenizer_eos(folder), vocab_size)


def _names(keys: Any) -> str:
    return some_names(sorted(key if isinstance(key, str) else str(key[0]) for key in keys))
