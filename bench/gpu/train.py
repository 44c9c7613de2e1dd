"""Trains a head further in a few minutes, from answers that were written beforehand, and compares it with the old one.

`outrider train --export-answers ANSWERS.npz` writes the answers, on any machine. Here the target computes the hidden
states of their tokens again, and training goes on from a head for as many minutes as there are. Held-out answers show
which of both heads drafts longer trees, and which sharpness of the logits does; the new head is written with it.

The output folder gets the head with its training report and curves (head/), and a page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.harness.errors import BenchError
from bench.harness.flags import positive_float, positive_int
from bench.harness.report import Report, results_folder
from bench.limits.growth import Answer, Grower, Policy, read_head
from bench.limits.walks import Walks
from outrider.checkpoints.checkpoint import resolve
from outrider.checkpoints.disk import put_in_place
from outrider.drafts import DEFAULT_HEAD
from outrider.process.python_command import python_command
from outrider.speculation.shape import TreeShape
from services.draft.learning.records.store import Record, Store

TREE = TreeShape(6, 6, 16)
FACTORS = (1.0, 1.1, 1.2, 1.35)
_MATRIX = "lm_head.weight"


def main(argv: Sequence[str]) -> None:
    """Train, and write gpu-train.* and head/ into the output folder."""
    parser = argparse.ArgumentParser(
        prog="outrider bench gpu-train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", type=Path, help="file of `outrider train --export-answers`")
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--initial", type=Path, default=DEFAULT_HEAD, help="head to go on from")
    parser.add_argument("--minutes", type=positive_float, default=5.0, help="time of the optimizer steps")
    parser.add_argument("--evaluate", type=positive_int, default=64, help="held-out answers for each choice")
    parser.add_argument("train", nargs="*", metavar="-- FLAG", help="further flags of `outrider train`, behind --")
    args = parser.parse_args(argv)
    head = results_folder() / "head"
    train(args, head)
    report = Report("gpu-train", "A head trained further in minutes")
    compare(report, args, head)
    report.notes = _notes(args, json.loads((head / "training.json").read_text()))
    report.write()


def train(args: argparse.Namespace, head: Path) -> None:
    """Train in a process of its own, which leaves the device to the comparison. Raises BenchError."""
    flags = [
        "--model-path", args.model_path, "--data", str(args.answers), "--initial", str(args.initial),
        "--output", str(head), "--minutes", str(args.minutes), "--tokens", str(1 << 40), "--evaluate", "0",
        "--max-running-requests", "256", "--max-length", "2048", "--epochs", "20", "--batch-tokens", "8192",
        "--learning-rate", "3e-4", "--unroll", "6", "--unroll-decay", "0.7",
    ]  # fmt: skip
    # The target and the training share the device: JAX must not take all of its memory at once.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = python_command("-um", "outrider", "train", *flags, *args.train)
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise BenchError(f"outrider train ended with code {code}")


def compare(report: Report, args: argparse.Namespace, head: Path) -> None:
    """Choose the new head's sharpness, write it, and add the accept length of both heads at each temperature."""
    model = resolve(args.model_path)
    held_out = _held_out(head.with_name("head.answers"))
    chosen, judged = held_out[args.evaluate : 2 * args.evaluate] or held_out, held_out[: args.evaluate]
    if not judged:
        report.notes.append("No answer is held out, so the heads are not compared.")
        return
    grower = Grower(read_head(head, model))
    factor = max(FACTORS, key=lambda one: sum(walks.length() for walks in walk(grower, chosen, one).values()))
    sharpen(head / "model.safetensors", factor)
    report.add(head="chosen sharpness", **{"of its logits": factor})
    for name, folder in (("before", args.initial), ("after", head)):
        for temperature, walks in walk(Grower(read_head(folder, model)), judged, 1.0).items():
            report.add(
                head=name, temperature=temperature, accept_length=walks.length(), interval=walks.interval(),
                answers=len(walks.counts),
            )  # fmt: skip


def walk(grower: Grower, records: Sequence[Record], factor: float) -> dict[float, Walks]:
    """Tokens and steps of trees along held-out answers, by temperature."""
    found: dict[float, Walks] = {}
    policy = Policy(TREE, sharpness=(factor,))
    for record in records:
        answer = Answer(record, TREE.steps)
        if len(answer.roots):
            found.setdefault(record.temperature, Walks()).add("all", grower.trees(answer, policy).chosen)
    return dict(sorted(found.items()))


def sharpen(file: Path, factor: float) -> None:
    """Multiply the matrix of a head's logits."""
    tensors = load_file(file)
    dtype = tensors[_MATRIX].dtype
    tensors[_MATRIX] = (factor * tensors[_MATRIX].astype(np.float32)).astype(dtype)
    part = file.with_suffix(".part")
    save_file(tensors, part, {"format": "pt"})
    put_in_place(part, file)


def _held_out(folder: Path) -> list[Record]:
    about = json.loads((folder / "about.json").read_text())
    row_bytes = about.pop("row_bytes")
    store = Store(folder, about, row_bytes)
    store.close()
    reader = store.read()
    return [reader.record(i) for i in reader.choose(held_out=True)]


def _notes(args: argparse.Namespace, training: dict[str, Any]) -> list[str]:
    seconds, waited = training["step_seconds"], training["waited_for_batches"]
    return [
        f"{args.answers.name}: {training['answers']} answers, {training['learnt_tokens']:,} tokens; "
        f"{training['steps']} steps in {seconds:.0f} s, of which {waited:.1f} s waited for batches",
        f"accept length: trees of {TREE.steps} steps, {TREE.topk} children, {TREE.rows} tokens, on held-out answers; "
        "interval: half of its 95 % interval",
        "before: the head that training went on from",
    ]
