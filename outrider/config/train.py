"""Flags of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from outrider.config.common import DEFAULT_MODEL, ProcessConfig
from outrider.config.tls import ServiceTlsOptions

TrainedAlgorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]


@dataclass(frozen=True)
class TrainConfig(ServiceTlsOptions, ProcessConfig):
    """Train a draft for a target: the target writes answers, and a head learns to foretell them."""

    model_path: Annotated[str, tyro.conf.arg(aliases=["--model"])] = DEFAULT_MODEL
    """Hugging Face id, local folder, or GGUF file of the target; "default" is SmolLM2-135M-Instruct."""
    algorithm: TrainedAlgorithm = "EAGLE3"
    """What is trained: a head of a kind (NEXTN: an MTP layer), or a small decoder."""
    initial: str | None = None
    """Folder of an EAGLE or EAGLE3 head to go on from; what is said of its shape is not heeded then."""
    output: str = "draft"
    """Folder that the draft is written into, in its published format, with a report of the training."""
    answers: str | None = None
    """Folder of what the target wrote, which several trainings may share; by default OUTPUT.answers."""
    data: tuple[str, ...] = ()
    """Files of prompts, JSON lines: "prompt", "text", "turns" or "messages". Without any, the target asks itself."""
    data_limit: int | None = None
    """Prompts taken of each file; by default all."""
    free_prompts: int | None = None
    """Conversations that the target begins, too, the user's turn included; by default none if there is data, and else
    as many as are needed."""
    free_openings: str | None = None
    """File of first words that these conversations begin with in turn, a line each; by default those that come along,
    which ask for tasks of many kinds."""
    tokens: int = 1_000_000
    """Tokens that the target writes."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the answers, in turn."""
    max_new_tokens: int = 256
    """Tokens of an answer, at most."""
    max_length: int = 1024
    """Tokens of a prompt and its answer, at most; longer prompts are left out."""
    max_running_requests: int = 64
    """Answers that are written at a time."""
    max_bytes: int = 32 << 30
    """Largest size of what the target wrote, hidden states included, in bytes."""
    target: str | None = None
    """Address of a target service that runs already, host:port or unix:/path; by default one is started."""
    epochs: float = 2.0
    """Times that the head sees every answer."""
    steps: int | None = None
    """Steps of the optimizer; by default as many as --epochs needs."""
    batch_tokens: int = 4096
    """Tokens of answers that a step of the optimizer learns from, about."""
    learning_rate: float = 5e-4
    """Highest learning rate; it warms up, and falls along a cosine."""
    warmup: float = 0.03
    """Part of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """Decay of matrices (AdamW)."""
    unroll: int = 6
    """Tokens ahead that a head learns to look, from its own states behind the first."""
    unroll_decay: float = 0.8
    """Part of the tokens from which the head looks a further one ahead, of those from which it looked so far."""
    draft_vocab_size: int = 8192
    """EAGLE3: tokens that the head can propose, the most frequent ones of the answers. EAGLE and NEXTN propose all, and
    learn from these. STANDALONE learns all."""
    intermediate_size: int | None = None
    """Width of the draft's feed-forward part; by default the target's, of a STANDALONE one 8/3 of its own width."""
    num_layers: int | None = None
    """Decoder layers of the draft; by default 1, of a STANDALONE one 4. An EAGLE3 head of several is loaded by this
    project and by vLLM, not by SGLang."""
    hidden_size: int | None = None
    """STANDALONE: width of the decoder; by default 256, or the target's if that is less."""
    aux_layers: tuple[int, ...] | None = None
    """Three layers of the target whose outputs the head is fed with, counted from 0; by default 1, L/2-1 and L-4."""
    held_out: float = 0.02
    """Part of the prompts that are kept for the evaluation."""
    evaluate: int = 64
    """Held-out answers on which the finished draft is replayed."""
    train_device: str = "auto"
    """Device of the training: auto, cpu, cuda, cuda:1, tpu, ..."""
    train_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products; auto is bfloat16. Weights and sums are float32."""
    checkpoint_seconds: float = 120.0
    """Seconds between checkpoints."""
    seed: int = 0
    """Seed of answers, of the order in which they are learnt, and of the head's first weights."""
