"""Dense decoders (decoder.py) on the CPU as programs of compiled kernels, built from the modules of `transformers`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import fingerprint
from outrider.checkpoints.gguf.record import GgufRecord
from outrider.native import vectors
from services.target.kernels.cpu import build, library
from services.target.kernels.cpu.attention.paged import WIDEST_HEAD, reads
from services.target.kernels.cpu.matrices import packed_file
from services.target.kernels.cpu.matrices.weights import ROUNDED, Format
from services.target.kernels.cpu.programs.program import Program
from services.target.kernels.kv_cache import KVCache
from services.target.model import decoder
from services.target.model.attention import Probe
from services.target.model.base import Outputs
from services.target.model.eagle_head import EagleHead
from services.target.model.eagle_head_weights import EagleHeadWeights, read_eagle_head
from services.target.model.linear import plain_format
from services.target.model.program_builder import ProgramBuilder
from services.target.model.stored.source import ModuleWeights, WeightSource
from services.target.step.batch import Batch
from services.target.step.programs import FusedLoop

log = logging.getLogger(__name__)

_PACKING = 2  # increase when weights are packed in another way, or order, by the same kernels
_WIDEST_NORM = 16384  # in kernels/cpu/csrc/matrices/norm.h


def serves(settings: Any) -> bool:
    """True if this machine has kernels for checkpoints with these settings."""
    return settings.model_type in decoder.MODEL_TYPES and library.available()


def unsupported_reason(module: Any, backend: str, cache_dtype: torch.dtype) -> str | None:
    """Why a model cannot run as a program; None if it can. backend: --attention-backend."""
    if (against := decoder.unsupported_reason(module)) is not None:
        return against
    try:
        library.load()
    except library.Unavailable as reason:
        return f"there are no compiled kernels, because {reason}"
    if backend not in ("auto", "native"):
        return f"--attention-backend is {backend}"
    if plain_format(module.dtype) is None or not reads(module.dtype, cache_dtype):
        return f"there are no kernels for {_named(module.dtype)} with a cache in {_named(cache_dtype)}"
    if module.model.layers[0].self_attn.head_dim > WIDEST_HEAD or module.config.hidden_size > _WIDEST_NORM:
        return "it is too wide for the kernels"
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ProgramRunner:
    """A `Runner` of a compiled program."""

    def __init__(
        self,
        module: Any,
        probe: Probe,
        number_format: Format | None,
        positions: int,
        pools: torch.dtype,
        copied: Format | None = None,
        *,
        prompt_lookup: bool = False,
        head: EagleHeadWeights | None = None,
        source: WeightSource | None = None,
    ) -> None:
        """module: a model without an `unsupported_reason`; its linear layers lose their weights.

        number_format: of the weights that the source does not keep in formats of their own; None: the model's own.
        positions: most tokens of a session; pools: dtype of the KV cache. copied: the format of a narrow copy of the
        weights, for drafting steps. prompt_lookup: as in Model. head: the local EAGLE head; not beside a copy. source:
        of the weights; None: the module, which otherwise need not have any.
        """
        own = plain_format(module.dtype)
        assert own is not None, "other formats have an unsupported_reason"
        self._dtype: torch.dtype = module.dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._writes: dict[str, Callable[[Tensor], object]] = {}
        self.threads = torch.get_num_threads()
        self.program = Program(self.threads, module.dtype, pools, module.config.hidden_size)
        self.weight_bytes = self.draft_bytes = 0  # read by a step, and by a drafting step
        self.mapped_bytes = 0  # of weights that lie in a file's pages
        self.copied, self.prompt_lookup = copied is not None, prompt_lookup
        states = () if head is None else head.layers
        source = ModuleWeights(module) if source is None else source
        self.kinds = Counter(source.kinds.values())  # number formats of the file that are kept; weights of each
        kept = filter(None, map(source.number_format, source.kinds))
        self._rounds = all(stored.number_format in ROUNDED for stored in kept)
        builder = ProgramBuilder(self, module, source, probe, number_format or own, positions, copied, states)
        builder.build()
        self.head: EagleHead | None = None
        if head is not None:
            assert builder.table is not None, "it was built"
            depth = len(module.model.layers)
            self.head = EagleHead(
                head, self.program, self.threads, builder.table, module.dtype, pools, depth, positions
            )
            self.draft_bytes = self.head.bytes

    @property
    def drafts(self) -> bool:
        """True if it drafts tokens, with a copy of its weights or an EAGLE head."""
        return self.copied or self.head is not None

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """Write the batch's keys and values. Returns logits in float32, features in the model's dtype, and tokens."""
        if isinstance(batch.program, FusedLoop):
            head = None if self.head is None else self.head.program
            logits, committed, iterations = self.program.fused_loop(head, batch, cache)
            return Outputs(logits, None, committed, iterations)
        logits, features, tokens = self.program.run(batch, cache)
        return Outputs(logits, features if features is None else features.to(self._dtype), tokens)

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights, as in checkpoints; none if some have formats to which none are rounded."""
        return self._shapes if self._rounds else {}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights in place. Wider ones are rounded first, as when a model is loaded."""
        packed_file.drop_pending()
        for name, tensor in tensors.items():
            self._writes[name](tensor.to(self._dtype))

    def add_weight(self, name: str, shape: tuple[int, ...], write: Callable[[Tensor], object]) -> None:
        """Register how a weight is replaced; a name may have several copies."""
        before = self._writes.get(name)
        self._shapes[name] = shape
        self._writes[name] = write if before is None else lambda tensor: (before(tensor), write(tensor))


def origin_of(folder: Path, record: GgufRecord | None) -> str:
    """What names a checkpoint's weights: its fingerprint, which samples them, and the state of its GGUF file."""
    return fingerprint(folder) + ("" if record is None else f", changed at {record.file.stat().st_mtime_ns} ns")


def program_of(
    module: Any,
    probe: Probe,
    cache_dtype: torch.dtype,
    context_length: int,
    number_format: Format | None,
    *,
    copied: Format | None,
    prompt_lookup: bool,
    head: Path | None,
    source: WeightSource | None = None,
    origin: str | None = None,
) -> ProgramRunner:
    """A model without an `unsupported_reason` as a compiled program, with what self-speculation needs.

    Arguments as of ProgramRunner; head: folder of the local EAGLE head. origin: of the weights, as of
    `origin_of`, under which packed ones are kept; None keeps none. Raises ConfigError for a head that does not fit.
    """
    vocab, hidden = module.model.embed_tokens.weight.shape
    read = None if head is None else read_eagle_head(head, len(probe.shapes), hidden, vocab, context_length)
    facts = None if origin is None else {
        "weights": origin, "head": None if head is None else fingerprint(head), "dtype": str(module.dtype),
        "formats": [number_format, copied], "kept": source is not None and bool(source.kinds),
        "kernels": build.KERNELS.compiled().name, "packing": _PACKING,
    }  # fmt: skip
    with packed_file.cached(facts) as file:
        runner = ProgramRunner(
            module, probe, number_format, context_length, cache_dtype, copied, prompt_lookup=prompt_lookup, head=read,
            source=source,
        )  # fmt: skip
        runner.mapped_bytes = 0 if file is None else file.taken
    if runner.kinds:
        kept = ", ".join(f"{count} in {kind}" for kind, count in sorted(runner.kinds.items()))
        log.info("weights keep the number formats of their file: %s", kept)
    unit = " and a matrix unit (AMX)" if library.load().outrider_has_matrix_unit() else ""
    log.info(
        "running as a compiled program, by %s%s; a step reads %.0f MB of weights",
        vectors.chosen().name.upper(), unit, runner.weight_bytes / 1e6,
    )  # fmt: skip
    if runner.drafts:
        drafter = "a quantized copy" if runner.copied else "a local EAGLE head"
        log.info("self-speculation with %s, which reads %.0f MB a draft token", drafter, runner.draft_bytes / 1e6)
    torch.set_num_threads(1)  # the program has its own threads, and PyTorch's would spin next to them
    return runner
