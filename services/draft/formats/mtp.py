"""MTP layers (NEXTN), part of the target's own checkpoint: each is a decoder layer of the model behind a fusion layer.

    layout        names                           fused input              layer
    DeepSeek-V3   model.layers.L.*                [embedding; feature]     latent attention, experts
    GLM-4.5       model.layers.L.*                [embedding; feature]     experts; latent attention in the small ones
    MiMo-7B       model.mtp_layers.0.*            [feature; embedding]     dense, as Qwen2
    MiMo-V2       model.mtp.layers.{0, 1, 2}.*    [embedding; feature]     dense, sliding window with sinks
    Step-3.5      model.layers.{L .. L + 2}.*     [embedding; feature]     dense, a gate a head, heads of their own
    Qwen3-Next,
    Qwen3.5       mtp.*                           [embedding; feature]     gated attention, dense or experts

The target service refuses Qwen3-Next and Qwen3.5 because of their linear attention, so their layers are read but not
used yet. L is the number of the model's layers, or 0 in exports of the MTP layer alone; the layer with eh_proj is the
MTP layer. Tensors are read as mtp.<i>.* with DeepSeek's names. Embedding and head are the target's, but for Step-3.5's
heads; copies are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from outrider.checkpoints.config_json import load_config, values_of
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.blocks import attention_part, feed_forward_part
from services.draft.formats.target import TargetCheckpoint, check_fit
from services.draft.model.layers.config import Attention, Layer, ModelConfig, check_activation
from services.draft.model.layers.heads import MtpHead
from services.draft.model.params import Params
from services.draft.model.weights.arrays import Put, layer_params, layer_shapes, putter
from services.draft.model.weights.dummy import open_tensors
from services.draft.model.weights.tensors import Tensors

FeatureState = Literal["auto", "normed", "raw"]

_COPIES = ("shared_head.head.weight", "embed_tokens.weight", "lm_head.weight")
_JOIN, _OWN_HEAD = "eh_proj.weight", "head.weight"
_NORMS = ("enorm.weight", "hnorm.weight", "norm.weight")
_RENAMED = (
    # MiMo-7B
    ("token_layernorm.", "enorm."), ("hidden_layernorm.", "hnorm."), ("input_proj.", "eh_proj."),
    ("final_layernorm.", "norm."),
    # DeepSeek, MiMo-V2, Qwen
    ("shared_head.norm.", "norm."), ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("self_attn.attention_sink_bias", "self_attn.sinks"), ("mlp.shared_expert.", "mlp.shared_experts."),
    # Step-3.5
    ("transformer.shared_head.norm.", "norm."), ("transformer.shared_head.output.", "head."),
)  # fmt: skip
_QWEN = (
    ("mtp.fc.", "mtp.0.eh_proj."), ("mtp.norm.", "mtp.0.norm."),
    ("mtp.pre_fc_norm_embedding.", "mtp.0.enorm."), ("mtp.pre_fc_norm_hidden.", "mtp.0.hnorm."),
)  # fmt: skip


@dataclass(frozen=True)
class MtpLayout:
    """How a model family publishes its MTP layers.

    layer:         pattern of the beginning of a layer's names; its group is the layer's number
    join:          the rest of a name that only its MTP layers have, such as the fusion layer's weight
    outside:       names of a single layer that begin otherwise, the fusion layer first, and their replacements
    feature_first: the fusion layer reads [feature; embedding]
    norm_offset:   added to published weights of norms
    zero_first_embedding:   the embedding at position 0 counts as zeros
    raw_feature:   the feature is the target's last state before the final norm instead of behind it
    stacked:       each layer predicts one token further, from the target's states
    chained:       stacked layers but the first read the state of the layer before instead, taken before its final norm
    own_heads:     each layer has an output layer of its own
    """

    name: str
    layer: str
    join: str = "eh_proj.weight"
    outside: tuple[tuple[str, str], ...] = ()
    feature_first: bool = False
    norm_offset: float = 0.0
    zero_first_embedding: bool = False
    raw_feature: bool = False
    stacked: bool = False
    chained: bool = False
    own_heads: bool = False


_PREFIX = r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
MTP_LAYOUTS = (
    MtpLayout(
        "MiMo-7B", _PREFIX + r"mtp_layers\.(\d+)\.", "input_proj.weight", feature_first=True, zero_first_embedding=True
    ),
    MtpLayout("MiMo-V2", _PREFIX + r"mtp\.layers\.(\d+)\.", raw_feature=True, stacked=True),
    MtpLayout(
        "Step-3.5",
        _PREFIX + r"layers\.(\d+)\.",
        "transformer.shared_head.output.weight",
        norm_offset=1.0,
        raw_feature=True,
        stacked=True,
        chained=True,
        own_heads=True,
    ),
    MtpLayout("Qwen3-Next", r"^mtp\.layers\.(\d+)\.", outside=_QWEN, norm_offset=1.0),
    MtpLayout("DeepSeek-V3", _PREFIX + r"layers\.(\d+)\."),
)


def find_layout(names: Iterable[str]) -> MtpLayout | None:
    """The layout of a checkpoint's tensors, found by the fusion layer's tensor; None without MTP layers."""
    found = set(names)
    return next((layout for layout in MTP_LAYOUTS if _joined_layers(layout, found)), None)


def _joined_layers(layout: MtpLayout, names: Iterable[str]) -> set[str]:
    """The numbers of the layers that have a fusion layer."""
    if layout.outside:
        return {"0"} if f"{layout.outside[0][0]}weight" in names else set()
    pattern = re.compile(layout.layer)
    return {found[1] for name in names if (found := pattern.match(name)) and name[found.end() :] == layout.join}


def holds_mtp(folder: Path) -> bool:
    """True if a checkpoint has an MTP layer."""
    with Tensors(folder) as tensors:
        return find_layout(tensors.names) is not None


def published_names(folder: Path) -> tuple[MtpLayout, dict[str, str]]:
    """The layout of a checkpoint with MTP layers, and the names in its files by those as of DeepSeek (mtp.<i>.*)."""
    with Tensors(folder) as tensors:
        layout = find_layout(tensors.names)
        assert layout is not None, "read_mtp has read it"
        known_as = _renaming(layout, tensors.names)
        return layout, {known_as(name): name for name in tensors.names}


def read_mtp(
    folder: Path,
    target: TargetCheckpoint,
    *,
    feature: FeatureState = "auto",
    own: FeatureState = "auto",
    several: bool = False,
    load_format: LoadFormat = "auto",
) -> DraftCheckpoint:
    """The MTP layers of a checkpoint. Raises ConfigError with the part that does not fit.

    feature: the target's state that is the feature; own: the state that the layer passes on to its next step. "raw"
    states are those before the final norm. several: use all layers, each for one token further, instead of the first.
    """
    raw = load_config(folder)
    raw = raw.get("text_config") or raw
    with Tensors(folder) as tensors:
        layout = find_layout(tensors.names)
        if layout is None:
            raise ConfigError(
                f"{folder} has no MTP layer: no tensor named like model.layers.N.eh_proj.weight, "
                "model.mtp_layers.0.input_proj.weight, model.mtp.layers.0.eh_proj.weight or mtp.fc.weight. Choose "
                "another --speculative-algorithm, or a checkpoint with an MTP layer"
            )
        known_as = _renaming(layout, tensors.names)
    with Tensors(folder, known_as) as tensors, values_of(folder / "config.json"):
        return _Reader(folder, raw, tensors, target, layout, known_as, several, load_format).draft(feature, own)


def _renaming(layout: MtpLayout, names: Iterable[str]) -> Callable[[str], str]:
    """Maps a name in the files to mtp.<i>.<name as of DeepSeek>; other names stay."""
    pattern = re.compile(layout.layer)
    index = {number: i for i, number in enumerate(sorted(_joined_layers(layout, names), key=int))}

    def known_as(name: str) -> str:
        for old, new in layout.outside:
            if name.startswith(old):
                return name.replace(old, new)
        found = pattern.match(name)
        if found is None or found[1] not in index:
            return name
        rest = name[found.end() :]
        for old, new in _RENAMED:
            rest = new + rest.removeprefix(old) if rest.startswith(old) else rest
        return f"mtp.{index[found[1]]}.{rest}"

    return known_as


@dataclass
class _Reader:
    """Reads one checkpoint. raw: its config.json."""

    folder: Path
    raw: dict[str, Any]
    tensors: Tensors
    target: TargetCheckpoint
    layout: MtpLayout
    known_as: Callable[[str], str]
    several: bool
    load_format: LoadFormat

    def draft(self, feature: FeatureState, own: FeatureState) -> DraftCheckpoint:
        """Raises ConfigError for a part that does not fit, KeyError for a key that config.json lacks."""
        check_activation(self.raw)
        hidden = self.raw["hidden_size"]
        check_fit(self.folder, self.target, vocab_size=self.raw["vocab_size"], hidden_size=hidden)
        config = self._config(hidden, own)
        shapes = self._shapes(config)
        what = f"a {self.layout.name} MTP layer, where mtp.0. stands for {self._published()}"
        self.tensors.check(what, shapes, _COPIES, within="mtp." if config.stacked else "mtp.0.")
        for name, shape in shapes.items():
            self.tensors.check_shape(name, shape)

        def load(dtype: Any) -> Params:
            with open_tensors(self.folder, self.known_as, self.load_format, self.target.replaced) as tensors:
                return self._load(tensors, config, shapes, dtype)

        raw_feature = self.layout.raw_feature if feature == "auto" else feature == "raw"
        spec = FeatureSpec(layers=(self.target.layers,)) if raw_feature else FeatureSpec(final=True)
        shared = self.target.shared(head=not self.layout.own_heads)
        if self.folder == self.target.folder:  # otherwise the layers are the draft's own
            shared |= self._in_files(shapes)
        return DraftCheckpoint(config, load, spec, shared=shared)

    def _in_files(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The same shapes by the names in the files."""
        _, names = published_names(self.folder)
        return {names[known]: shape for known, shape in shapes.items() if known in names}

    def _published(self) -> str:
        """The beginning of the first layer's names in the files."""
        pattern = re.compile(self.layout.layer)
        with Tensors(self.folder) as tensors:
            found = [pattern.match(name) for name in tensors.names if self.known_as(name).startswith("mtp.0.")]
        return next((match[0] for match in found if match is not None), "mtp.")

    def _config(self, hidden: int, own: FeatureState) -> ModelConfig:
        raw = self.raw
        epsilon = raw.get("rms_norm_eps") or raw.get("layernorm_epsilon") or 1e-6
        names = {name.removeprefix("mtp.0.") for name in self.tensors.names if name.startswith("mtp.0.")}
        layers = self._stack(lambda i: Layer(attention_part(raw, names, i), feed_forward_part(raw, names, i), epsilon))
        return ModelConfig(
            architecture=f"{(raw.get('architectures') or [self.layout.name])[0]} MTP",
            vocab_size=self.target.vocab_size,
            hidden_size=hidden,
            layers=layers,
            context=int(raw.get("max_position_embeddings", 2048)),
            head=MtpHead(
                epsilon,
                passes_normed=own == "normed" or (own == "auto" and not self.layout.chained),
                zero_first_embedding=self.layout.zero_first_embedding,
            ),
            stacked=len(layers) > 1 or self.layout.own_heads,
            chained=self.layout.chained,
            own_heads=self.layout.own_heads,
            eos_token_ids=self.target.eos_token_ids,
        )

    def _stack(self, describe: Callable[[int], Layer]) -> tuple[Layer, ...]:
        """The layers that draft. describe: one of them, by its number."""
        layer = describe(0)
        count = len({name.split(".")[1] for name in self.tensors.names if name.startswith("mtp.")})
        if self.several and count == 1:
            raise ConfigError(f"{self.folder} has one MTP layer; --enable-multi-layer-eagle needs several")
        if not self.several and not self.layout.stacked:
            return (layer,)
        described = [describe(i) for i in range(count)]
        attentions = [one.attention for one in described if isinstance(one.attention, Attention)]
        if len(attentions) < count:
            raise ConfigError(
                f"{self.folder} has {count} MTP layers with latent attention, which cannot draft together; leave out "
                "--enable-multi-layer-eagle to draft with the first one"
            )
        stacked = enumerate(zip(described, attentions, strict=True))
        return tuple(replace(one, attention=replace(attention, first=i)) for i, (one, attention) in stacked)

    def _shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for i, layer in enumerate(config.layers):
            own: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS, (hidden,))
            own |= {_JOIN: (hidden, 2 * hidden)} | layer_shapes(layer, hidden)
            if self.layout.own_heads:
                own[_OWN_HEAD] = (config.vocab_size, hidden)
            shapes |= {f"mtp.{i}.{name}": shape for name, shape in own.items()}
        return shapes

    def _load(self, tensors: Tensors, config: ModelConfig, shapes: dict[str, tuple[int, ...]], dtype: Any) -> Params:
        put, offset = putter(dtype), self.layout.norm_offset
        joins = [self._join(tensors, f"mtp.{i}.", shapes, put) for i in range(len(config.layers))]
        params: Params = {"joins": joins} if config.stacked else joins[0]
        params["layers"] = [
            layer_params(tensors, f"mtp.{i}.", layer, config.hidden_size, put, norm_offset=offset)
            for i, layer in enumerate(config.layers)
        ]
        if not self.layout.own_heads:
            return params | self.target.embedding_and_head(put)
        heads = [f"mtp.{i}.{_OWN_HEAD}" for i in range(len(config.layers))]
        params["head"] = put(np.concatenate([tensors.read(name, shapes[name]).T for name in heads]))
        return params | self.target.embedding_and_head(put, head=False)

    def _join(self, tensors: Tensors, prefix: str, shapes: dict[str, tuple[int, ...]], put: Put) -> Params:
        """The fusion layer and the norms of a layer, as MtpHead has them."""

        def norm(name: str) -> jax.Array:
            weight = tensors.read(prefix + name, shapes[prefix + name])
            return put(weight.astype(np.float32) + np.float32(self.layout.norm_offset))

        fuse = tensors.read(prefix + _JOIN, shapes[prefix + _JOIN])
        if self.layout.feature_first:
            fuse = np.concatenate(np.split(fuse, 2, axis=1)[::-1], axis=1)
        return {
            "fuse": put(fuse.T),
            "embedding_norm": norm("enorm.weight"),
            "feature_norm": norm("hnorm.weight"),
            "norm": norm("norm.weight"),
        }
