"""Loads a dense decoder as a compiled program, from a folder in the published format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoints import checkpoint
from outrider.checkpoints.gguf.record import read_record
from outrider.checkpoints.headers import tensor_headers
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.process.startup import STARTUP
from services.target.kernels.cpu import library
from services.target.kernels.device import pick_device, pick_dtype
from services.target.kernels.pools import pick_cache_dtype
from services.target.model import native
from services.target.model.attention import Call, Probe
from services.target.model.base import Model
from services.target.model.dense.config import DenseConfig, Unknown, dense_config
from services.target.model.dense.modules import DenseDecoder
from services.target.model.gguf.weights import open_gguf
from services.target.model.loading import positions, self_check, support
from services.target.model.loading.self_speculation import plan_self_speculation
from services.target.model.loading.weight_quantization import cpu_format

log = logging.getLogger(__name__)

_DTYPES = ("F32", "F16", "BF16")


def folder_of(config: TargetConfig) -> Path:
    """The folder of the target's model, downloaded or converted if need be. Raises ConfigError.

    It describes a GGUF file if the model runs as a compiled program, which reads the weights from the file.
    """
    gguf = checkpoint.gguf_file(config.model_path)
    device = pick_device(config.device) if gguf is not None and "," not in config.device else None
    if gguf is None or device is None or device.type != "cpu" or config.tp_size > 1 or config.enable_torch_compile:
        return checkpoint.resolve(config.model_path, whole=True)
    folder = checkpoint.resolve(config.model_path, description=True)
    try:
        _decoder_of(folder, config)
    except Unknown:
        from services.target.model.loading.load import reason_to_convert

        if reason := reason_to_convert(folder, config, device):
            log.info("%s is converted, because %s", gguf.name, reason)
            return checkpoint.resolve(config.model_path, whole=True)
    return folder


def load_dense(folder: Path, config: TargetConfig) -> Model | None:
    """Load a folder's model on the CPU, or None for one that `loading.load` must load.

    folder: as of `folder_of`, or any checkpoint. Raises ConfigError for flags that do not fit the model.
    """
    record = read_record(folder)
    try:
        _check_flags(config)
        module, cache_dtype = _decoder_of(folder, config)
        files = _files_of(folder, module) if record is None else {}
    except (Unknown, ConfigError) as reason:  # an error is reported where all checkpoints are read
        log.debug("%s is loaded by transformers: %s", folder, reason)
        return None
    STARTUP.done("settings")
    settings, dtype = module.config, module.dtype
    source = None if record is None else open_gguf(record, module, config)
    if record is None:
        log.info("loading %s as %s", folder, str(dtype).removeprefix("torch."))
        module.assign(dict(_tensors(files)))
    support.check_vocabulary(folder, settings.vocab_size)
    STARTUP.done("reading weights")
    context_length = positions.context_length(settings, config.context_length)
    probe, means = _probe_of(settings, dtype), plan_self_speculation(config, module, None, source)
    runner = native.program_of(
        module, probe, cache_dtype, context_length, cpu_format(config.quantization), copied=means.copied,
        prompt_lookup=means.prompt_lookup, head=means.head, source=source, origin=native.origin_of(folder, record),
    )  # fmt: skip
    STARTUP.done("packing weights")
    model = Model(
        runner=runner,
        device=torch.device("cpu"),
        dtype=dtype,
        cache_dtype=cache_dtype,
        architecture=settings.architecture,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        context_length=context_length,
        eos_token_ids=_eos_token_ids(settings, folder),
        shapes=tuple(probe.shapes[layer] for layer in range(len(probe.shapes))),
        tokenizer_file=file if (file := folder / "tokenizer.json").is_file() else None,
        copied=runner.copied,
        head=runner.head,
        prompt_lookup=runner.prompt_lookup,
        kinds=runner.kinds,
        step_bytes=runner.weight_bytes,
        mapped_bytes=runner.mapped_bytes,
    )
    self_check.check(model)
    STARTUP.done("checks")
    return model


def _decoder_of(folder: Path, config: TargetConfig) -> tuple[DenseDecoder, torch.dtype]:
    """The decoder that config.json describes, without weights, and the format of its cache. Raises Unknown."""
    cpu = torch.device("cpu")
    settings = dense_config(checkpoint.load_json(folder / "config.json"))
    dtype = pick_dtype(config.dtype, settings, cpu, compiled=library.available())
    module = DenseDecoder(settings, dtype)
    cache_dtype = pick_cache_dtype(config.kv_cache_dtype, dtype, cpu)
    if reason := native.unsupported_reason(module, config.attention_backend, cache_dtype):
        raise Unknown(reason)
    return module, cache_dtype


def _check_flags(config: TargetConfig) -> None:
    """Raise Unknown for flags that ask for more than a compiled program on one rank."""
    if config.tp_size != 1 or config.deterministic or config.enable_torch_compile:
        raise Unknown("its flags ask for another way to run it")


def _files_of(folder: Path, module: DenseDecoder) -> Mapping[Path, list[str]]:
    """The folder's files with their tensors, which are exactly those of the module. Raises Unknown, ConfigError."""
    headers = {file: tensor_headers(file) for file in checkpoint.weight_files(folder)}
    found = [(name, entry) for entries in headers.values() for name, entry in entries.items()]
    if len(found) != len(dict(found)) or {name: entry.shape for name, entry in found} != module.shapes():
        raise Unknown("its tensors are others")
    if any(entry.dtype not in _DTYPES for _, entry in found):
        raise Unknown("its tensors have other formats")
    return {file: list(entries) for file, entries in headers.items()}


def _tensors(files: Mapping[Path, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, as views of the mapped files."""
    for file, names in files.items():
        with safe_open(file, "pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def _probe_of(config: DenseConfig, dtype: torch.dtype) -> Probe:
    """What a forward pass of one token would show of each layer."""
    probe = Probe()
    heads = config.num_attention_heads, config.num_key_value_heads
    query, key = (torch.empty(1, count, config.head_dim, dtype=dtype) for count in heads)
    for layer in range(config.num_hidden_layers):
        probe.attend(Call(layer, query, key, key.clone(), config.head_dim**-0.5, None, None, None))
    return probe


def _eos_token_ids(config: DenseConfig, folder: Path) -> tuple[int, ...]:
    """As of `loading.load`: the end-of-sequence ids of the model and of its tokenizer."""
    file = folder / "generation_config.json"
    stated = checkpoint.load_json(file).get("eos_token_id") if file.is_file() else None
    own = config.eos_token_id if stated is None else stated
    return support.known_ids(own, support.tokenizer_eos(folder), config.vocab_size)
