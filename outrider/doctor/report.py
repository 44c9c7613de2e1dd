"""The whole report, and the command's output and exit code."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator, Sequence

from outrider.config import MODEL_ALGORITHMS, DoctorConfig
from outrider.doctor import machine, probes, services, software
from outrider.doctor.findings import Finding, as_json, as_text, exit_code, problem
from outrider.doctor.table import page
from outrider.errors import ConfigError
from outrider.placement.devices import gpus, tpu_chips
from outrider.supervisor.dry_run import Plan, make_plan
from outrider.supervisor.memory import target_gpus

_OWN_FLAGS = ("--json", "--no-json", "--no-memory-table")
_SECRETS = ("--api-key", "--admin-api-key")
# Packages without which a child process would only repeat that they are missing.
_NEEDS = {"torch": "torch", "jax": "jax", "kernels of draft": "jax"}


def doctor(config: DoctorConfig, notes: Sequence[str], flags: Sequence[str]) -> tuple[str, int]:
    """What the command prints, and its exit code. flags: the command line. Raises ConfigError.

    notes: about the command line
    """
    if config.memory_table:
        return page().rstrip(), 0
    if config.dry_run != "off":
        raise ConfigError("outrider doctor starts nothing in any case; leave --dry-run out")
    found, command = list(findings(config, notes)), served_by(flags)
    return (as_json if config.json else as_text)(found, command), exit_code(found)


def served_by(flags: Sequence[str]) -> str:
    """The command that would start the system, without the doctor's own flags and without API keys."""
    words, secret = ["outrider", "serve"], False
    for flag in flags:
        if flag.startswith("--"):
            name, _, value = flag.partition("=")
            secret = name in _SECRETS
            flag = f"{name}=HIDDEN" if secret and value else flag  # noqa: PLW2901
        elif secret:
            flag = "HIDDEN"  # noqa: PLW2901
        if flag not in _OWN_FLAGS:
            words.append(flag)
    return shlex.join(words)


def findings(config: DoctorConfig, notes: Sequence[str] = ()) -> Iterator[Finding]:
    """All findings about this machine and a command line."""
    plan: Plan | None = None
    refused: ConfigError | None = None
    try:
        plan = make_plan(config, notes)
    except ConfigError as error:
        refused = error
    found, tpus, find = gpus(), tpu_chips(), software.version_of
    answers = probes.ask_all(
        {
            name: code
            for name, code in probes.questions().items()
            if name not in _NEEDS or importlib.util.find_spec(_NEEDS[name])
        }
    )
    yield from machine.findings(found)
    yield from software.packages(software.requirements(), find)
    on_gpu = plan is not None and any(map(target_gpus, plan.made.targets))
    if "torch" in answers:
        yield software.torch(answers["torch"], found, wanted=on_gpu or plan is None, find=find)
    if plan is not None:
        yield from software.torchao(plan.made.target.quantization, on_gpu=on_gpu, find=find)
    if "jax" in answers:
        yield software.jax(answers["jax"], found, tpus, wanted=_draft_wants_device(plan), find=find)
    kernels = {part: answers[name] for part in probes.KERNELS if (name := f"kernels of {part}") in answers}
    yield from software.kernels(kernels)
    yield software.bytecode()
    if plan is None:
        assert refused is not None
        yield problem(services.SYSTEM, "flags", refused.message)
        return
    nothing: probes.Facts = {}
    yield from services.findings(config, plan, found, answers.get("torch", nothing), answers.get("jax", nothing))


def _draft_wants_device(plan: Plan | None) -> bool:
    """True if the draft has a model, and the flags name an accelerator for it."""
    draft = plan.made.draft if plan is not None else None
    if draft is None or draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return False
    return draft.draft_device.partition(":")[0] not in ("auto", "cpu")
