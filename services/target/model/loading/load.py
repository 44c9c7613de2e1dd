"""Loading a model: any causal LM that `transformers` knows and that uses its attention interface.

The folder's tensors must be exactly those that the model needs; a missing one is refused, for it would be random.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.checkpoints import checkpoint
from outrider.config import DType, TargetConfig
from outrider.errors import ConfigError
from outrider.native import vectors
from services.target.kernels.cpu import library
from services.target.kernels.dispatch import Planner, choose
from services.target.kernels.kv_cache import pick_cache_dtype
from services.target.model import attention, latent, native
from services.target.model.base import Model, Runner
from services.target.model.cuda import graphs
from services.target.model.deterministic import selection as deterministic
from services.target.model.deterministic.batch_invariance import check as check_batch_invariance
from services.target.model.head import read_head
from services.target.model.linear import pack
from services.target.model.loading import positions, quantized, shards, support
from services.target.model.loading import self_check as selfcheck
from services.target.model.loading.narrow import check_dtype, cpu_format, narrowed, tell_of_experts
from services.target.model.loading.self_speculation import plan_self_speculation
from services.target.model.modules import ModuleRunner
from services.target.step.upload import use_device

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMED_TENSORS = 5


def load(folder: Path, config: TargetConfig) -> Model:
    """Load a model from a folder. Raises ConfigError saying what does not fit."""
    device = pick_device(config.device)
    planner = choose(config.attention_backend, device, ordered=config.deterministic)
    if config.deterministic:
        deterministic.check_flags(config, device)
    checkpoint.weight_files(folder)  # raises for missing files
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    settings, remote = support.read_settings(folder, config.trust_remote_code)
    positions.stretch(settings.get_text_config(), config.context_length)
    how = narrowed(config.quantization, settings, device)
    how |= shards.split(folder, settings, config.tp_size) | quantized.prepare(settings, device)
    dtype = pick_dtype(config.dtype, settings, device)
    check_dtype(config.quantization, dtype, device)
    module = _read_weights(folder, settings, dtype, remote, how)
    module.to(device).eval().requires_grad_(False)
    tell_of_experts(config.quantization, module)
    vocab_size = module.get_output_embeddings().weight.shape[0]
    support.check_vocabulary(folder, vocab_size)
    if config.tp_size == 1:
        latent.install(module)
    probe = pass_a_token(module, device)
    assert probe.dtype is not None
    cache_dtype = pick_cache_dtype(config.kv_cache_dtype, probe.dtype, device)
    context_length = positions.context_length(module.config.get_text_config(), config.context_length)
    _check_window(module, probe, context_length)
    runner = _runner(module, how, probe, planner, cache_dtype, context_length, config, device)
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
    )
    selfcheck.check(model)
    if config.deterministic:
        check_batch_invariance(model)
    return model


def _runner(
    module: Any,
    how: dict[str, Any],
    probe: attention.Probe,
    planner: Planner,
    cache_dtype: torch.dtype,
    context_length: int,
    config: TargetConfig,
    device: torch.device,
) -> Runner:
    """A program of kernels where there is one for the model, else its modules, on a CPU with linear layers laid out."""
    plain = config.tp_size > 1 or config.enable_torch_compile
    reason: str | None = "it needs compiled kernels on a CPU, without --tp-size and --enable-torch-compile"
    if device.type == "cpu" and not plain:
        number_format = cpu_format(config.quantization)
        reason = native.reason_against(module, config.attention_backend, cache_dtype)
        means = plan_self_speculation(config, module, reason)
        if reason is None:
            head = None
            if means.head is not None:
                vocab, hidden = module.get_input_embeddings().weight.shape
                head = read_head(means.head, len(probe.shapes), hidden, vocab, context_length)
            runner = native.ProgramRunner(
                module, probe, number_format, context_length, cache_dtype, means.copied,
                prompt_lookup=means.prompt_lookup, head=head,
            )  # fmt: skip
            unit = " and a matrix unit (AMX)" if library.load().outrider_has_matrix_unit() else ""
            log.info(
                "running as a compiled program, by %s%s; a step reads %.0f MB of weights",
                vectors.chosen().name.upper(), unit, runner.weight_bytes / 1e6,
            )  # fmt: skip
            if runner.copied and runner.head is not None:
                log.info(
                    "drafting by itself, too: with a copy (%.0f MB a step) and a head that guesses for it",
                    runner.draft_bytes / 1e6,
                )
            elif runner.drafts:
                log.info("drafting by itself, too; that reads %.0f MB a token", runner.draft_bytes / 1e6)
            torch.set_num_threads(1)  # the program has threads of its own, and PyTorch's would spin beside them
            return runner
        log.info("running module by module: %s", reason)
        pack(module, number_format)
    elif config.quantization is not None and device.type == "cpu":
        raise ConfigError("--quantization on a CPU goes with neither --tp-size nor --enable-torch-compile")
    plan_self_speculation(config, module, reason)  # raises if they were asked for
    if device.type == "cuda" and config.tp_size == 1 and not config.deterministic:
        fused = _fused(module, probe, planner, context_length)
        if fused is not None:
            return graphs.wrap(fused, config, device)
    around = deterministic.prepare(module, how, probe, device) if config.deterministic else None
    return graphs.wrap(ModuleRunner(module, planner, around), config, device)


def _fused(module: Any, probe: attention.Probe, planner: Planner, context_length: int) -> ModuleRunner | None:
    """The model in few launches, where there are kernels for it."""
    if importlib.util.find_spec("triton") is None:
        return None
    from services.target.model.cuda import fused

    reason = fused.reason_against(module)
    if reason is not None:
        log.info("running module by module: %s", reason)
        return None
    runner = fused.FusedRunner(module, planner, probe, context_length)
    torch.cuda.empty_cache()  # of the weights that were laid beside others; the KV cache takes what is free
    return runner


def pick_device(name: str) -> torch.device:
    """The device of a flag. Raises ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'"{name}" is no device; write auto, cpu, cuda or cuda:1') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name} is not supported; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name}; PyTorch sees {torch.cuda.device_count()} CUDA devices")
    use_device(device)
    return device


def pick_dtype(name: DType, settings: Any, device: torch.device) -> torch.dtype:
    """The number format of a flag: auto is the checkpoint's, on a CPU float32 where no kernels serve it."""
    if name != "auto":
        return _DTYPES[name]
    stored = settings.get_text_config().dtype or settings.dtype or torch.float32
    if device.type == "cpu" and not (stored == torch.bfloat16 and native.serves(settings)):
        return torch.float32
    return stored


def _read_weights(folder: Path, settings: Any, dtype: torch.dtype, remote: bool, how: dict[str, Any]) -> Any:
    log.info("loading %s as %s", folder, str(dtype).removeprefix("torch."))
    try:
        module, report = support.auto_class(settings).from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=remote,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            **how,
        )
    except Exception as error:
        reason = support.first_line(error)
        if isinstance(error, KeyError) and error.args == (attention.NAME,):  # it has a table of its own
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


@torch.inference_mode()
def pass_a_token(module: Any, device: torch.device) -> attention.Probe:
    """See what a model stores and how it attends. Raises ConfigError if the paged cache cannot serve it."""
    probe = attention.Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with attention.probing(probe):
        try:
            output = module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=token[0])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(module).__name__} cannot be called as needed: {support.first_line(error)}"
            ) from error
    text = module.config.get_text_config()
    layers = text.num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise ConfigError(
            f"{type(module).__name__}: {len(probe.shapes)} of {layers} layers use the attention interface of "
            "transformers; the others cannot be served from a paged cache"
        )
    if output.logits.shape[:2] != (1, 1):
        raise ConfigError(f"{type(module).__name__} cannot compute the logits of chosen rows alone")
    kinds = getattr(text, "layer_types", None) or ()
    for layer, kind in enumerate(kinds[:layers]):
        if kind == "sliding_attention" and probe.windows[layer] is None:
            raise ConfigError(f"{type(module).__name__} does not say how wide the window of layer {layer} is")
    return probe


def _check_window(module: Any, probe: attention.Probe, context_length: int) -> None:
    """Raise ConfigError for a model that masks by a window which it does not tell its attention of, as PhiMoE does."""
    text = module.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    masks = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    if not window or not masks or getattr(text, "layer_types", None) or any(probe.windows.values()):
        return
    if window < context_length:
        raise ConfigError(
            f"{type(module).__name__} does not tell its attention of its window of {window} tokens; "
            f"choose --context-length {window} or less"
        )


def _eos_token_ids(module: Any, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The model's own, and the tokenizer's: a model that learnt a chat's format often has its end there alone.

    Others than tokens of the model, such as -1 for none, end nothing.
    """
    stated = [
        getattr(source, "eos_token_id", None)
        for source in (getattr(module, "generation_config", None), module.config.get_text_config())
    ]
    own = next((one for one in stated if one is not None), ())
    ids = [*(own if isinstance(own, list | tuple) else [own]), support.tokenizer_eos(folder)]
    known = dict.fromkeys(int(token) for token in ids if token is not None)
    return tuple(token for token in known if 0 <= token < vocab_size)


def _names(keys: Any) -> str:
    names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
    more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
    return ", ".join(names[:_NAMED_TENSORS]) + more
