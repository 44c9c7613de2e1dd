"""What fits GPUs of several sizes: the page docs/memory.md, by the code that plans memory at the start of a system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outrider.config import Algorithm, DraftConfig, TargetConfig
from outrider.doctor.shapes import HEADS, LLAMA_1B, LLAMA_8B, LLAMA_70B, QWEN_2B, QWEN_32B, ModelShape
from outrider.errors import ConfigError
from outrider.placement.memory import GIB, GRAPH_BYTES, GRAPH_VARIANTS, MIB, MemoryPlan
from outrider.placement.step_sizes import captured_rows
from outrider.supervisor.memory import draft_need, plan_gpu

# Memory that programs find on such a card, in GiB: less than in its name, where error correction takes a part.
CARDS = {
    "24 GB": ("L4", 22.0),
    "40 GB": ("A100", 39.4),
    "48 GB": ("L40S", 44.4),
    "80 GB": ("H100", 79.1),
    "141 GB": ("H200", 139.7),
}
_FORMATS = {"bfloat16": None, "fp8": "fp8"}
_DOES_NOT_FIT = "-"
_ENDLESS = 1 << 50  # memory for any model
_HEAD = """\
# Memory: what fits a GPU

`make memory` writes this page with the code that plans memory when a system starts, at default flags.
`outrider doctor --memory-table` prints it; `outrider doctor` with the flags of `serve` shows one plan on this machine.

**Not measured on a GPU.** Weights and KV cache follow from shapes. *working* is an estimate: a CUDA context and
workspaces, activations of the largest step, and the footprint of captured CUDA graphs ({graphs} graphs of {graph_mib}
MiB each and their outputs, for {running} sessions). *draft* is what a draft on the same GPU gets: its weights, for a
head the target's embedding, a context, workspaces, and a KV cache, all within 2 GiB (head) or 6 GiB (small model), or
more where the weights need it. Beside fp8 weights the draft has fp8 weights, too. 2 % of a GPU stay free.
`tests/gpu/test_memory_plan.py` compares plans with what a GPU reports.

Cells are **tokens in the target's KV cache**, in bfloat16, over all sessions; `--kv-cache-dtype fp8_e4m3` doubles them.
`-`: does not fit. A draft on a device of its own leaves the target as many tokens as `none`. Programs find on these
GPUs: {cards}.
"""


class Row(NamedTuple):
    """A line of the table. whole: the plan without a limit. drafts: the draft's memory on each card.

    plans: on each card; None where the model does not fit
    """

    model: ModelShape
    weights: str
    draft: str
    whole: MemoryPlan
    drafts: list[int]
    plans: list[MemoryPlan | None]


def rows(model: ModelShape, small: ModelShape, tp_size: int = 1) -> Iterator[Row]:
    """The lines of a model. small: the draft of STANDALONE. tp_size: GPUs that share the model."""
    kinds: list[tuple[str, Algorithm, ModelShape | None]] = [
        ("none", "NONE", None),
        ("EAGLE-3 head", "EAGLE3", HEADS[model]),
        (small.name, "STANDALONE", small),
    ]
    for name, quantization in _FORMATS.items():
        target = TargetConfig(quantization="fp8" if quantization else None, tp_size=tp_size)
        for label, algorithm, shape in kinds:
            draft = DraftConfig(speculative_algorithm=algorithm, speculative_draft_model_quantization=quantization)
            drafts, plans = [], []
            for _, gib in CARDS.values():
                total = int(gib * GIB)
                beside = 0 if shape is None else draft_need(draft, model, shape, total).bytes
                drafts.append(beside)
                plans.append(_plan(target, model, total, beside))
            yield Row(model, name, label, plan_gpu(target, model, _ENDLESS), drafts, plans)


def _plan(target: TargetConfig, model: ModelShape, total: int, draft: int) -> MemoryPlan | None:
    try:
        return plan_gpu(target, model, total, draft=draft)
    except ConfigError:
        return None


def page() -> str:
    """The whole page, as Markdown that is readable in a terminal."""
    defaults = TargetConfig()
    cards = ", ".join(f"{name} {gib} GiB ({card})" for name, (card, gib) in CARDS.items())
    parts = [
        _HEAD.format(
            graphs=len(captured_rows(defaults)) * GRAPH_VARIANTS, graph_mib=GRAPH_BYTES // MIB,
            running=defaults.max_running_requests, cards=cards,
        )
    ]  # fmt: skip
    pairs = ((LLAMA_8B, LLAMA_1B), (QWEN_32B, QWEN_2B), (LLAMA_70B, LLAMA_1B))
    for model, small in pairs:
        parts += [f"\n## {model.name} on one GPU\n\n", _table(list(rows(model, small)))]
    parts.append(
        "\n## Two GPUs\n\nWith `--tp-size 2` each GPU has half of the weights and of the KV cache. The draft\n"
    )
    parts.append("lies on the first one, which decides on the number of tokens.\n\n")
    parts.append(_table([row for model, small in pairs[1:] for row in rows(model, small, tp_size=2)], names=True))
    return "".join(parts)


def _table(lines: Sequence[Row], *, names: bool = False) -> str:
    """A table. names: with the models'."""
    header = [
        *(["model"] if names else []),
        "weights",
        "draft beside it",
        "weights GiB",
        "working GiB",
        "draft GiB",
        *CARDS,
    ]
    cells = [header]
    for line in lines:
        parts = [f"{part / GIB:.1f}" for part in (line.whole.weights, line.whole.working)]
        tokens = [f"{plan.tokens:,}" if plan else _DOES_NOT_FIT for plan in line.plans]
        cells.append(
            [*([line.model.name] if names else []), line.weights, line.draft, *parts, _span(line.drafts), *tokens]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    text_columns = len(header) - len(CARDS) - 3
    ruler = ["-" * width if i < text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lined = [
        [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in (lined[0], ruler, *lined[1:]))


def _span(sizes: Sequence[int]) -> str:
    """A draft's memory, or the range of it over GPUs of several sizes."""
    words = list(dict.fromkeys(f"{size / GIB:.1f}" for size in sizes))
    return "" if words == ["0.0"] else " to ".join(dict.fromkeys((words[0], words[-1])))
