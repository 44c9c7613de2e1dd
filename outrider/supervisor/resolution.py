"""The flags of `outrider serve` as this machine can follow them. Changes, and flags without effect, are logged.

1. a device that only one of the services has: --device tpu
2. the drafter, and self-speculation beside it (drafter_choice.py); the default model has no MTP layers, but a head
3. variables of SGLang in the environment
4. a tree with more nodes than its levels have
5. flags that the drafter does not use
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from outrider.config import BUILT_IN_ALGORITHMS, FED_ALGORITHMS, MODEL_ALGORITHMS, ServeConfig
from outrider.config.compatibility.environment import environment_notes
from outrider.drafts import has_bundled_head
from outrider.placement.tree_shapes import tree_shape
from outrider.supervisor.drafter_choice import choose_drafters

log = logging.getLogger(__name__)

_GPU = Path("/dev/nvidiactl")
_MAPPED = ("STANDALONE", *BUILT_IN_ALGORITHMS)  # propose tokens of the target's whole vocabulary
# Drafters that use a flag, by the flag's field; a drafter that is not named here uses none of them. Flags that are
# refused without their drafter, and those of NGRAM, which may draft beside any other one, are left out.
_USED_BY = {
    "speculative_draft_model_path": MODEL_ALGORITHMS,
    "speculative_draft_model_revision": MODEL_ALGORITHMS,
    "speculative_draft_load_format": MODEL_ALGORITHMS,
    "speculative_draft_model_quantization": MODEL_ALGORITHMS,
    "speculative_token_map": _MAPPED,
    "enable_multi_layer_eagle": BUILT_IN_ALGORITHMS,
    "speculative_mtp_feature": BUILT_IN_ALGORITHMS,
    "speculative_mtp_own_state": BUILT_IN_ALGORITHMS,
    "draft_dtype": MODEL_ALGORITHMS,
    "draft_device": MODEL_ALGORITHMS,
    "draft_tp_size": MODEL_ALGORITHMS,
    "draft_attention_backend": MODEL_ALGORITHMS,
    "draft_feature_dtype": FED_ALGORITHMS,
    "draft_page_size": MODEL_ALGORITHMS,
    "draft_max_total_tokens": MODEL_ALGORITHMS,
    "draft_mem_fraction_static": MODEL_ALGORITHMS,
    "precompile_bs_paddings": MODEL_ALGORITHMS,
}


def resolve_config(config: ServeConfig, environ: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration that is started. Raises ConfigError for flags that exclude one another.

    environ: the environment's variables; default those of this process
    """
    config = choose_drafters(_with_bundled_head(_with_devices(config)))
    draft, shared = config.draft, config.shared
    environ = os.environ if environ is None else environ
    for note in environment_notes(environ, draft.speculative_algorithm, shared.speculative_eagle_topk):
        log.warning("%s", note)
    return _with_used_flags(_with_possible_tree(config))


def target_on_cpu(config: ServeConfig) -> bool:
    """True if the target will compute on a CPU, as far as this process can see."""
    kind = config.target.device.partition(":")[0]
    return kind == "cpu" or (kind == "auto" and not _GPU.exists())


def _with_devices(config: ServeConfig) -> ServeConfig:
    """`--device tpu` means the draft service: JAX computes on TPUs, PyTorch on CUDA devices and CPUs."""
    if config.target.device.partition(":")[0] != "tpu":
        return config
    here = replace(config, target=replace(config.target, device="auto"))
    where = "this machine's CPU" if target_on_cpu(here) else "this machine's GPU"
    log.warning(
        "--device %s: the target service (PyTorch) does not run on TPUs and uses %s; the draft service (JAX) uses the "
        "TPU, if JAX finds one (--draft-device). To verify on another machine's GPU, run `outrider target` and "
        "`outrider gateway` there and `outrider draft --draft-device tpu` here",
        config.target.device,
        where,
    )
    return here


def _with_bundled_head(config: ServeConfig) -> ServeConfig:
    """With the default model's EAGLE-3 head for EAGLE and NEXTN, because that model has no MTP layers."""
    draft, model = config.draft, config.target.model_path
    built_in = draft.speculative_algorithm in BUILT_IN_ALGORITHMS and draft.speculative_draft_model_path is None
    if not built_in or not has_bundled_head(model):
        return config
    log.warning(
        "--speculative-algorithm %s: the default model has no MTP layers; its bundled EAGLE-3 head drafts (EAGLE3)",
        draft.speculative_algorithm,
    )
    return replace(config, draft=replace(draft, speculative_algorithm="EAGLE3"))


def _with_possible_tree(config: ServeConfig) -> ServeConfig:
    """With no more tokens a step than the tree has; those of a chain are its steps and the root."""
    shape = tree_shape(config.shared, config.draft.speculative_algorithm)
    asked = config.shared.speculative_num_draft_tokens
    if shape is None or asked is None or shape.rows == asked:
        return config
    log.warning("%s", shape.note(asked))
    return replace(config, shared=replace(config.shared, speculative_num_draft_tokens=shape.rows))


def _with_used_flags(config: ServeConfig) -> ServeConfig:
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
        log.warning("--%s has no effect with %s; it is for %s", name.replace("_", "-"), algorithm, used_by)
    path, revision = draft.speculative_draft_model_path, draft.speculative_draft_model_revision
    if revision is not None and algorithm in MODEL_ALGORITHMS and (path is None or Path(path).expanduser().exists()):
        unused["speculative_draft_model_revision"] = None
        what = "the drafter reads the target's checkpoint" if path is None else f"{path} is not a Hugging Face id"
        log.warning("--speculative-draft-model-revision has no effect: %s", what)
    return replace(config, draft=replace(draft, **unused))  # type: ignore[arg-type]
