"""The flags of `outrider serve` as this machine can follow them. Changes, and flags without effect, are logged.

1. a device that only one of the services has: --device tpu
2. the drafter, and self-speculation beside it (drafter_choice.py); the default model has no MTP layers, but a head
3. devices of all replicas; a GPU of its own for the draft, if the targets leave one (replicas.py)
4. variables of SGLang in the environment
5. a tree with more nodes than its levels have
6. flags that the drafter does not use
"""

from __future__ import annotations

import logging
import os
from dataclasses import fields, replace
from pathlib import Path

from outrider.config import (
    BUILT_IN_ALGORITHMS,
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    ONLINE_ALGORITHMS,
    ServeConfig,
    flag_of,
)
from outrider.config.compatibility.environment import environment_notes
from outrider.drafts import has_bundled_head
from outrider.placement.devices import has_gpu
from outrider.placement.tree_shapes import tree_shape
from outrider.speculation.shape import block_shape
from outrider.supervisor.drafter_choice import choose_drafters
from outrider.supervisor.replicas import with_devices

log = logging.getLogger(__name__)

_MAPPED = ("STANDALONE", "DFLASH", *BUILT_IN_ALGORITHMS)  # propose tokens of the target's whole vocabulary
# Drafters that use a flag, by the flag's field; a drafter that is not named here uses none of them. Flags that are
# refused without their drafter, and those of NGRAM, which may draft beside any other one, are left out.
_USED_BY = {
    "speculative_draft_model_path": MODEL_ALGORITHMS,
    "speculative_draft_model_revision": MODEL_ALGORITHMS,
    "speculative_draft_load_format": MODEL_ALGORITHMS,
    "speculative_draft_model_quantization": MODEL_ALGORITHMS,
    "speculative_dflash_block_size": ("DFLASH",),
    "speculative_token_map": _MAPPED,
    "enable_multi_layer_eagle": BUILT_IN_ALGORITHMS,
    "speculative_mtp_feature": BUILT_IN_ALGORITHMS,
    "speculative_mtp_own_state": BUILT_IN_ALGORITHMS,
    "draft_dtype": MODEL_ALGORITHMS,
    "draft_device": MODEL_ALGORITHMS,
    "draft_tp_size": MODEL_ALGORITHMS,
    "draft_attention_backend": MODEL_ALGORITHMS,
    "draft_ahead": ("STANDALONE", *ONLINE_ALGORITHMS),
    "draft_feature_dtype": FED_ALGORITHMS,
    "draft_page_size": MODEL_ALGORITHMS,
    "draft_max_total_tokens": MODEL_ALGORITHMS,
    "draft_mem_fraction_static": MODEL_ALGORITHMS,
    "draft_memory_bytes": MODEL_ALGORITHMS,
    "precompile_bs_paddings": MODEL_ALGORITHMS,
}


def resolve_config(config: ServeConfig, logged: set[str] | None = None) -> ServeConfig:
    """The configuration that is started. Raises ConfigError for flags that exclude one another.

    logged: the warnings of earlier calls, which are not logged again; those of this call are added
    """
    notes: list[str] = []
    config = with_devices(choose_drafters(_with_bundled_head(_with_known_device(config, notes), notes)))
    config = _with_block(config)
    algorithm, topk = config.draft.speculative_algorithm, config.shared.speculative_eagle_topk
    notes += environment_notes(os.environ, algorithm, topk)
    config = _with_used_flags(_with_possible_tree(config, notes), notes)
    logged = set() if logged is None else logged
    for note in notes:
        if note not in logged:
            log.warning("%s", note)
    logged.update(notes)
    return config


def target_on_cpu(config: ServeConfig) -> bool:
    """True if the target will compute on a CPU, as far as this process can see."""
    kind = config.target.device.partition(":")[0]
    return kind == "cpu" or (kind == "auto" and not has_gpu())


def _with_known_device(config: ServeConfig, notes: list[str]) -> ServeConfig:
    """`--device tpu` means the draft service: JAX computes on TPUs, PyTorch on CUDA devices and CPUs."""
    if config.target.device.partition(":")[0] != "tpu":
        return config
    here = replace(config, target=replace(config.target, device="auto"))
    where = "this machine's CPU" if target_on_cpu(here) else "this machine's GPU"
    notes.append(
        f"--device {config.target.device}: the target service (PyTorch) does not run on TPUs and uses {where}; the "
        "draft service (JAX) uses the TPU, if JAX finds one (--draft-device). To verify on another machine's GPU, run "
        "`outrider target` and `outrider gateway` there and `outrider draft --draft-device tpu` here"
    )
    return here


def _with_bundled_head(config: ServeConfig, notes: list[str]) -> ServeConfig:
    """With the default model's EAGLE-3 head for EAGLE and NEXTN, because that model has no MTP layers."""
    draft, model = config.draft, config.target.model_path
    built_in = draft.speculative_algorithm in BUILT_IN_ALGORITHMS and draft.speculative_draft_model_path is None
    if not built_in or not has_bundled_head(model):
        return config
    notes.append(
        f"--speculative-algorithm {draft.speculative_algorithm}: the default model has no MTP layers; its bundled "
        "EAGLE-3 head drafts (EAGLE3)"
    )
    return replace(config, draft=replace(draft, speculative_algorithm="EAGLE3"))


def _with_block(config: ServeConfig) -> ServeConfig:
    """With the three flags of a block drafter's tree, where some of its flags fix it. Raises ConfigError."""
    draft, flags = config.draft, config.shared
    if draft.speculative_algorithm != "DFLASH":
        return config
    shape = block_shape(
        flags.speculative_num_steps, flags.speculative_eagle_topk, flags.speculative_num_draft_tokens,
        draft.speculative_dflash_block_size,
    )  # fmt: skip
    # Without a shape these may be 1, which is not the shape of a block.
    none = {"speculative_num_steps": None, "speculative_eagle_topk": None}
    return replace(config, shared=replace(flags, **(none if shape is None else shape.flags())))


def _with_possible_tree(config: ServeConfig, notes: list[str]) -> ServeConfig:
    """With no more tokens a step than the tree has; those of a chain are its steps and the root."""
    shape = tree_shape(config.shared, config.draft.speculative_algorithm)
    asked = config.shared.speculative_num_draft_tokens
    if shape is None or asked is None or shape.rows == asked:
        return config
    notes.append(shape.note(asked))
    return replace(config, shared=replace(config.shared, speculative_num_draft_tokens=shape.rows))


def _with_used_flags(config: ServeConfig, notes: list[str]) -> ServeConfig:
    """Without the flags that the drafter does not use."""
    draft = config.draft
    algorithm = draft.speculative_algorithm
    unused = {
        field.name: field.default
        for field in fields(draft)
        if algorithm not in _USED_BY.get(field.name, (algorithm,)) and getattr(draft, field.name) != field.default
    }
    for name in unused:
        used_by = ", ".join(_USED_BY[name])
        notes.append(f"{flag_of(name)} has no effect with {algorithm}; it is for {used_by}")
    path, revision = draft.speculative_draft_model_path, draft.speculative_draft_model_revision
    if revision is not None and algorithm in MODEL_ALGORITHMS and (path is None or Path(path).expanduser().exists()):
        unused["speculative_draft_model_revision"] = None
        what = "the drafter reads the target's checkpoint" if path is None else f"{path} is not a Hugging Face id"
        notes.append(f"--speculative-draft-model-revision has no effect: {what}")
    return replace(config, draft=replace(draft, **unused))  # type: ignore[arg-type]
