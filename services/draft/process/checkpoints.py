"""The checkpoint of the draft model: the reader of its format, its token map, and its facts for the handshake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.config import BUILT_IN_ALGORITHMS, FED_ALGORITHMS, DraftConfig, LoadFormat
from outrider.errors import ConfigError
from outrider.wire.v1 import common_pb2
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.decoders import read_decoder
from services.draft.formats.dflash import read_dflash
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.mtp import holds_mtp, read_mtp
from services.draft.formats.target import TargetCheckpoint, read_target
from services.draft.formats.token_map import OWN_MAP, read_token_map, with_token_map
from services.draft.model.layers.config import ModelConfig
from services.draft.model.weights.dummy import has_weights

log = logging.getLogger(__name__)

_HEADS: dict[str, Callable[[Path, TargetCheckpoint, LoadFormat], DraftCheckpoint]] = {
    "EAGLE": read_eagle, "NEXTN": read_eagle, "EAGLE3": read_eagle3, "DFLASH": read_dflash,
}  # fmt: skip


def draft_folder(config: DraftConfig) -> Path:
    """The folder of the draft model, downloaded and converted if necessary. Raises ConfigError."""
    load_format = config.speculative_draft_load_format
    return checkpoint.resolve_draft(
        draft_path(config), config.speculative_draft_model_revision, load_format, whole=True
    )


def draft_path(config: DraftConfig) -> str:
    """Path of the draft model: --speculative-draft-model-path, or the target's own checkpoint."""
    path = config.speculative_draft_model_path or config.model_path
    assert path is not None, "flags.check refuses a drafter without a model path"
    return path


def read_draft(
    folder: Path, config: DraftConfig, shared: Path | None = None, replaced: Mapping[str, NDArray[Any]] | None = None
) -> tuple[DraftCheckpoint, Path]:
    """The draft model, and the folder whose tokenizer it uses. Raises ConfigError.

    shared: folder of the target's weights, if it is not --model-path. replaced: tensors of the target that are others
    """
    load_format = config.speculative_draft_load_format
    if config.speculative_algorithm not in FED_ALGORITHMS:
        return read_decoder(folder, load_format), folder
    assert config.model_path is not None
    target = checkpoint.resolve(config.model_path)
    algorithm, facts = config.speculative_algorithm, replace(read_target(target), replaced=replaced or {})
    own_layers = folder == target
    if shared is not None:
        facts = replace(facts, folder=shared)
        folder = shared if own_layers and _holds_mtp(shared, load_format) else folder
    if algorithm in BUILT_IN_ALGORITHMS and (own_layers or _holds_mtp(folder, load_format)):
        draft = read_mtp(
            folder, facts, feature=config.speculative_mtp_feature, own=config.speculative_mtp_own_state,
            several=config.enable_multi_layer_eagle, load_format=load_format,
        )  # fmt: skip
        _check_steps(config, draft)
        return draft, target
    if config.enable_multi_layer_eagle:
        log.warning("--enable-multi-layer-eagle has no effect: %s holds a head, not MTP layers", folder)
    return _HEADS[algorithm](folder, facts, load_format), target


def _holds_mtp(folder: Path, load_format: LoadFormat) -> bool:
    """True if a folder has MTP layers. Random weights of a folder without files are those of a head."""
    return (load_format != "dummy" or has_weights(folder)) and holds_mtp(folder)


def _check_steps(config: DraftConfig, draft: DraftCheckpoint) -> None:
    """Raise ConfigError if --speculative-num-steps is not the number of stacked MTP layers."""
    steps, layers = config.speculative_num_steps, len(draft.config.layers)
    if draft.config.stacked and steps not in (None, layers):
        raise ConfigError(
            f"--speculative-num-steps {steps} does not fit {layers} MTP layers that predict one token further each; "
            f"leave it out, or set {layers}"
        )


def with_map_of(config: DraftConfig, draft: DraftCheckpoint, folder: Path) -> DraftCheckpoint:
    """The draft model with the token map of --speculative-token-map, or else of its folder, if there is one.

    Raises ConfigError.
    """
    own = folder / OWN_MAP
    path = config.speculative_token_map or (str(own) if own.is_file() else None)
    if path is None:
        return draft
    if config.speculative_algorithm == "EAGLE3":
        log.warning("--speculative-token-map is ignored: an EAGLE-3 head has a vocabulary of its own")
        return draft
    vocab_size = draft.config.vocab_size
    ids = read_token_map(path, vocab_size)
    log.info("the draft proposes %d of %d tokens", len(ids), vocab_size)
    return with_token_map(draft, ids)


def vocab_limit(folder: Path) -> int:
    """Number of ids of a tokenizer; larger ids are padding of the embedding, which the target may lack."""
    return max(checkpoint.vocabulary(folder).values(), default=2**31 - 2) + 1


def describe_model(
    folder: Path, vocabulary: Path, config: DraftConfig, model: ModelConfig, dtype: str
) -> common_pb2.ModelInfo:
    """Facts of a draft model for the handshake. folder: its own; vocabulary: folder of its tokenizer."""
    dummy = config.speculative_draft_load_format == "dummy"
    return common_pb2.ModelInfo(
        model_path=checkpoint.display_name(draft_path(config)),
        fingerprint="dummy" if dummy else checkpoint.fingerprint(folder),
        architecture=model.architecture,
        # The vocabulary of a feature-based head is internal: its ids are mapped to the target's.
        vocab_size=read_target(vocabulary).vocab_size if model.head.uses_features else model.vocab_size,
        vocab_hash=checkpoint.vocab_hash(vocabulary),
        context_length=model.context,
        dtype=dtype,
    )
