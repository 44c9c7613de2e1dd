"""The state of online training on disk, so that a restarted draft goes on learning where it ended.

One file beside the published weights: the weights in training and their average, the optimizer's moments, the
vocabulary, the replay buffer and the counters. It is written as a whole or not at all; NumPy's archive format has a
checksum for each array. A file that belongs to another head or target, or that is damaged, is not used: the log names
the reason, and learning begins with an empty buffer.
"""

from __future__ import annotations

import json
import logging
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.npyio import NpzFile

from outrider.checkpoints.disk import put_in_place
from outrider.serving.messages import OnlineStats
from services.draft.learning.records.store import Record
from services.draft.online.replay_buffer import Segment

if TYPE_CHECKING:
    from services.draft.online.learner import Learner

log = logging.getLogger(__name__)

STATE = "learner.state"
"""Name of the file."""

_FORMAT = 3


class _Unusable(Exception):
    """The file cannot be used. args: the reason."""


def save_state(folder: Path, learner: Learner, facts: dict[str, Any]) -> None:
    """Write the state of a learner. facts: what a later process must have in common. Failures are only logged."""
    part = folder / f"{STATE}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **_arrays(learner, facts))
        put_in_place(part, folder / STATE)
    except OSError as error:
        log.warning("the state of online learning could not be written to %s: %s; free some space there", folder, error)
    finally:
        part.unlink(missing_ok=True)


def _arrays(learner: Learner, facts: dict[str, Any]) -> dict[str, Any]:
    buffer, state = learner.sampler.buffer, learner.trainer.state
    recent, sample = buffer.snapshot()
    segments = {segment.number: segment for segment in (*recent, *sample)}
    entries = [
        {
            "number": number, "version": s.version, "key": s.key, "prompt": s.record.prompt, "first": s.record.first,
            "temperature": s.record.temperature, "held_out": s.record.held_out,
        }
        for number, s in segments.items()
    ]  # fmt: skip
    about = {
        "format": _FORMAT, "facts": facts, "load": asdict(learner.load()), "step": learner.trainer.step,
        "part": learner.serving.part,
        "buffer": buffer.counters(), "sampler": learner.sampler.used, "segments": entries,
        "recent": [s.number for s in recent], "sample": [s.number for s in sample],
    }  # fmt: skip
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), "ids": learner.ids}
    arrays |= {f"train.{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((state, learner.averaged)))}
    for number, segment in segments.items():
        arrays |= {f"tokens.{number}": segment.record.tokens, f"rows.{number}": segment.record.rows}
    return arrays


def load_state(folder: Path, learner: Learner, facts: dict[str, Any]) -> bool:
    """Restore a learner from a folder, before it runs. False without a usable file; the log names the reason."""
    file = folder / STATE
    if not file.is_file():
        return False
    try:
        with np.load(file, allow_pickle=False) as arrays:
            _restore(arrays, learner, facts)
    except _Unusable as reason:
        log.warning("the state in %s is not used: %s; learning begins with an empty buffer", file, reason)
        return False
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        log.warning("the state in %s is damaged (%s); learning begins with an empty buffer", file, error)
        return False
    return True


def _restore(arrays: NpzFile, learner: Learner, facts: dict[str, Any]) -> None:
    """Read everything first, so that a damaged file changes nothing. Raises _Unusable."""
    about = json.loads(arrays["about"].tobytes())
    if about["format"] != _FORMAT:
        raise _Unusable("another release wrote it")
    found = about["facts"]
    for name in facts.keys() - {"weights"}:
        if found.get(name) != facts[name]:
            raise _Unusable(f"it is of another {name}, {found.get(name)!r} instead of {facts[name]!r}")
    leaves, structure = jax.tree.flatten((learner.trainer.state, learner.averaged))
    state = [arrays[f"train.{i}"] for i in range(len(leaves))]
    ids = arrays["ids"]
    if [a.shape for a in state] != [a.shape for a in leaves] or ids.shape != learner.ids.shape:
        raise _Unusable("its weights have other shapes")
    segments = {}
    for entry in about["segments"]:
        number = entry["number"]
        record = Record(
            arrays[f"tokens.{number}"], arrays[f"rows.{number}"], entry["prompt"], entry["first"],
            entry["temperature"], 0, entry["held_out"],
        )  # fmt: skip
        segments[number] = Segment(record, number, entry["version"], entry["key"])
    buffer = learner.sampler.buffer
    buffer.restore(
        [segments[n] for n in about["recent"]], [segments[n] for n in about["sample"]], about["buffer"]
    )  # fmt: skip
    learner.sampler.used = about["sampler"]
    load = OnlineStats(**about["load"])
    if found.get("weights") == facts["weights"]:
        trained, averaged = jax.tree.unflatten(structure, [jnp.asarray(array) for array in state])
        learner.resume(load, trained, averaged, ids, about["step"])
        learner.serving = learner.serving._replace(part=about["part"])
    else:  # weights were taken over after the state was written
        log.info("the weights are newer than the state of their training, which goes on from the weights")
        learner.resume(load)
    log.info(
        "online learning goes on after %d steps, with %d stored segments of %.1f MB",
        load.steps, len(segments), sum(segment.record.rows.nbytes for segment in segments.values()) / 1e6,
    )  # fmt: skip
