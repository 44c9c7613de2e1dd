"""Two tensor-parallel ranks that stay for many models: rank 0 in this process, rank 1 in one of its own.

python -m tests.support.target.rank_pair HOST:PORT      rank 1: loads and follows one model after the other
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from outrider.config import TargetConfig
from services.target.kernels.dispatch import choose
from services.target.model.base import Model
from services.target.model.cuda.graphs import GraphRunner, RankCapturer, direct
from services.target.model.loading import quantized, runners
from services.target.model.loading.load import load
from services.target.model.loading.probe import pass_a_token
from services.target.model.weight_slots import WeightSlots
from services.target.process.ranks import group
from services.target.process.ranks.channel import Kind
from services.target.process.ranks.following import Follower
from services.target.process.ranks.leading import LeadingRunner

SPLIT = {"device": "cpu", "dtype": "float32", "tp_size": 2}
SIZES = [1, 4, 12]  # of captured steps


class RankPair:
    """Rank 0 of both. process: rank 1."""

    def __init__(self) -> None:
        config = TargetConfig(**SPLIT)
        store = group.host(Path(), config)
        command = [sys.executable, "-m", __name__, f"{group.HOST}:{store.port}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self._threads = torch.get_num_threads()
        self.channel = group.join(store, 0, config)
        self._following = False

    def load(self, folder: Path, *, fused: bool = False, fp8: bool = False, refuses: str = "", **flags: Any) -> Model:
        """A model on both ranks, in place of the one before.

        fused: as decoders run on CUDA: with fused kernels, and in steps of a few sizes. fp8: as on CUDA with kernels
        for FP8, which stays packed. refuses: a weight of which rank 1 takes no update
        """
        self._end_model()
        flags = SPLIT | {"model_path": str(folder)} | flags
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"flags": flags, "fused": fused, "fp8": fp8, "refuses": refuses}) + "\n")
        self.process.stdin.flush()
        model = loaded(TargetConfig(**flags), fused=fused, fp8=fp8)
        self._following = True
        assert isinstance(model.runner, runners.ModuleRunner | GraphRunner)
        return replace(model, runner=LeadingRunner(model.runner, self.channel, model.device))

    def close(self) -> None:
        """End rank 1."""
        self._end_model()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.process.wait()
        dist.destroy_process_group()
        torch.set_num_threads(self._threads)

    def _end_model(self) -> None:
        if self._following:
            self.channel.send(Kind.END)
        self._following = False


def loaded(config: TargetConfig, *, fused: bool, fp8: bool) -> Model:
    """This rank's part."""
    if fp8:
        return _load_fp8(config)
    if not fused:
        return load(Path(config.model_path), config)
    from services.target.model.cuda.fused import FusedRunner

    with mock.patch.object(runners, "pack"):
        model = load(Path(config.model_path), replace(config, attention_backend="torch_native"))
    assert isinstance(model.runner, runners.ModuleRunner)
    module = model.runner.module
    probe = pass_a_token(module, model.device)
    backend = "triton" if config.attention_backend == "triton" else "torch_native"
    runner = FusedRunner(module, choose(backend, model.device), probe, model.context_length)
    return replace(model, runner=GraphRunner(runner, SIZES, RankCapturer(direct)))


def _load_fp8(config: TargetConfig) -> Model:
    """A rank's part with packed FP8 weights, whose products are plain ones: CPUs have no kernels for them."""

    def multiply(x, weight, scale, block, bias=None, *_: Any):
        assert weight.dtype == torch.float8_e4m3fn
        whole = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return torch.nn.functional.linear(x, weight.to(x.dtype) * whole.to(x.dtype), bias)

    finegrained_fp8.fp8_linear = multiply  # also after loading
    with (
        mock.patch.object(quantized, "_kept", return_value=True),
        mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"),
    ):
        return load(Path(config.model_path), config)


def main() -> None:
    """Rank 1."""
    channel = group.join(group.connect(sys.argv[1]), 1, TargetConfig(**SPLIT))
    for line in sys.stdin:
        job = json.loads(line)
        model = loaded(TargetConfig(**job["flags"]), fused=job["fused"], fp8=job["fp8"])
        parts = WeightSlots.parts

        def refusing(self: WeightSlots, name: str, tensor: torch.Tensor, parts=parts, refused=job["refuses"]):
            if name == refused:
                raise MemoryError("no room for it")
            return parts(self, name, tensor)

        with mock.patch.object(WeightSlots, "parts", refusing):
            Follower(model, channel).run()


if __name__ == "__main__":
    main()
