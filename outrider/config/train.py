"""Flags of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from outrider.config.access.tls import ServiceTlsOptions
from outrider.config.access.token import ServiceTokenOptions
from outrider.config.common import DEFAULT_MODEL, ProcessConfig

TrainedAlgorithm = Literal["DFLASH", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]


@dataclass(frozen=True)
class TrainedModelOptions:
    """What is trained, and for which target."""

    topic: ClassVar[str] = "model"

    model_path: Annotated[str, tyro.conf.arg(aliases=["--model"])] = DEFAULT_MODEL
    """Hugging Face id, local folder or GGUF file of the target; "default" is SmolLM2-135M-Instruct."""
    algorithm: TrainedAlgorithm = "EAGLE3"
    """Kind of draft model: an EAGLE or EAGLE3 head, an MTP layer (NEXTN), a block drafter (DFLASH), or a small decoder
    (STANDALONE)."""
    initial: str | None = None
    """Folder of an EAGLE or EAGLE3 head to continue from, or of a checkpoint with an MTP layer (NEXTN), whose shape
    overrides the flags. Default: random weights."""
    output: str = "draft"
    """Folder for the draft model, in its published format, with a report of the training."""


@dataclass(frozen=True)
class DataOptions:
    """Prompts and answers that the training learns from."""

    topic: ClassVar[str] = "training data"

    data: tuple[str, ...] = ()
    """Files of JSON lines: prompts ("prompt", "text", "turns" or "messages"), or rollouts with token ids; or files of
    --export-answers. Default: the target writes prompts."""
    data_limit: int | None = None
    """Prompts read from each file. Default: all."""
    answers: str | None = None
    """Folder of the target's answers, which several trainings may share. Default: OUTPUT.answers."""
    export_answers: str | None = None
    """Write the answers as token ids into this .npz file for a training on another machine, and train nothing. An
    interrupted run continues from --answers."""
    tokens: int = 1_000_000
    """Tokens that the target generates."""
    free_prompts: int | None = None
    """Conversations in which the target also writes the user's first message. Default: none with --data, else as many
    as --tokens needs."""
    free_openings: str | None = None
    """File of first words for these conversations, one opening a line. Default: bundled openings for many tasks."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the answers, used in turn."""
    max_new_tokens: int = 256
    """Maximum tokens of an answer."""
    max_length: int = 1024
    """Maximum tokens of a prompt and its answer; longer prompts are left out."""
    max_running_requests: int = 64
    """Answers that the target generates at a time."""
    max_bytes: int = 32 << 30
    """Maximum size of the target's answers on disk, hidden states included, in bytes."""
    target: str | None = None
    """Address of a running target service, host:port or unix:/path. Default: the training starts one."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer's schedule."""

    topic: ClassVar[str] = "optimization"

    epochs: float = 2.0
    """Passes over all answers."""
    steps: int | None = None
    """Optimizer steps. Default: as many as --epochs needs."""
    minutes: float | None = None
    """Time of the optimizer steps, in minutes: if it is too short for all steps, the schedule has as many as fit,
    measured before the first one. Default: no limit."""
    batch_tokens: int = 4096
    """Answer tokens per optimizer step, approximately."""
    learning_rate: float = 5e-4
    """Peak learning rate, with linear warm-up and cosine decay."""
    warmup: float = 0.03
    """Fraction of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """Weight decay of matrices (AdamW)."""
    unroll: int = 6
    """Draft depth in training: tokens ahead, from the head's own states after the first. DFLASH learns its block."""
    unroll_decay: float = 0.8
    """Fraction of the tokens at each depth that are trained at the next depth."""
    train_device: str = "auto"
    """Device of the training: auto, cpu, cuda, cuda:1, tpu, ..., or a list: cuda:0,cuda:2."""
    train_dp_size: int | None = None
    """Devices that share each optimizer step (data parallelism). Default: all GPUs or TPUs of the machine, or those
    that --train-device lists; 1 on a CPU."""
    train_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products. auto: bfloat16. Weights and sums are float32."""
    checkpoint_seconds: float = 120.0
    """Time between checkpoints, in seconds."""
    seed: int = 0
    """Seed of the answers, of their order and of the initial weights."""


@dataclass(frozen=True)
class ShapeOptions:
    """Shape of the draft model."""

    topic: ClassVar[str] = "draft model"

    draft_vocab_size: int = 8192
    """EAGLE3: tokens that the head can propose, the most frequent of the answers. EAGLE, NEXTN and DFLASH propose all
    tokens and learn from these; STANDALONE learns all."""
    intermediate_size: int | None = None
    """Width of the feed-forward part. Default: the target's; for STANDALONE 8/3 of --hidden-size."""
    num_layers: int | None = None
    """Decoder layers. Default: 1, for DFLASH 3, for STANDALONE 4. This project and vLLM load EAGLE3 heads of several
    layers, SGLang does not."""
    hidden_size: int | None = None
    """STANDALONE: width of the decoder. Default: 256, or the target's if that is less."""
    aux_layers: tuple[int, ...] | None = None
    """Target layers whose outputs the head reads, counted from 0: three, for DFLASH any number. Default: 1, L/2-1 and
    L-4 of L layers, for DFLASH five from 1 to L-3."""
    block_size: int = 8
    """DFLASH: positions that one pass computes, the root included."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation of the draft model."""

    topic: ClassVar[str] = "evaluation"

    held_out: float = 0.02
    """Fraction of the prompts held out for the evaluation."""
    evaluate: int = 64
    """Held-out answers that the evaluation replays through the draft engine."""


@dataclass(frozen=True)
class TrainConfig(
    EvaluationOptions,
    ShapeOptions,
    OptimizerOptions,
    DataOptions,
    TrainedModelOptions,
    ServiceTokenOptions,
    ServiceTlsOptions,
    ProcessConfig,
):
    """Train a draft model for a target on answers that the target generates."""

    common: ClassVar[tuple[str, ...]] = (
        "model_path", "algorithm", "output", "data", "tokens", "target", "epochs", "learning_rate", "train_device",
        "draft_vocab_size",
    )  # fmt: skip
