"""What `outrider serve` would start with the same flags: model, drafter, device and cores of each service, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.checkpoints import checkpoint, checksums, conversion
from outrider.config import DEFAULT_MODEL, MODEL_ALGORITHMS, DraftConfig, ServeConfig, TargetConfig
from outrider.doctor.findings import Finding, note, ok, problem
from outrider.doctor.probes import Facts
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.placement.cores import choose_cores, draft_has_own_place
from outrider.placement.devices import Gpu
from outrider.placement.memory import GIB
from outrider.process.ports import host_and_port, socket_path, take_port
from outrider.supervisor.dry_run import Plan
from outrider.supervisor.memory import draft_gpus, headroom_of, plan_of, target_gpus

SYSTEM, MEMORY, FLAGS = "system", "memory", "flags"
_DRAFT_MODEL = "--speculative-draft-model-path"


def findings(asked: ServeConfig, plan: Plan, found: Sequence[Gpu], torch: Facts, jax: Facts) -> Iterator[Finding]:
    """Everything about the system. asked: the flags of the command line. found: the GPUs. torch, jax: probes."""
    made = plan.made
    yield _model(made.target.model_path)
    yield from converted()
    yield drafter(asked, plan)
    for name, one in made.services:
        cores = plan.processes[name].cores
        if isinstance(one, TargetConfig):
            yield target_device(one, found, torch, cores, name, auto=asked.target.device == "auto")
        else:
            yield draft_device(one, made.targets, jax, cores, name)
    yield ok(SYSTEM, "gateway", f"CPU, cores {plan.processes['gateway'].cores}")
    yield from ports(plan)
    for text in plan.obstacles:
        if text.startswith(_DRAFT_MODEL):
            yield problem(SYSTEM, "draft model", text, "name a folder that exists")
    yield from memory(plan, found)
    for text in plan.warnings:
        if text not in plan.obstacles:
            yield note(FLAGS, "warning", text)


def _model(path: str) -> Finding:
    """Where the target's checkpoint is."""
    name = checkpoint.display_name(path)
    try:
        folder = checkpoint.local_folder(path)
        if folder is not None:
            return ok(SYSTEM, "model", name if name == str(folder) else f"{name} in {folder}")
        if path == DEFAULT_MODEL:
            source = conversion.default_gguf()
            return ok(SYSTEM, "model", f"{name}, the default; the first start reads {source.name}, in seconds on a CPU")
    except ConfigError as error:
        return problem(SYSTEM, "model", f"{name}: {error.message}")
    if path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf"):
        if Path(path).expanduser().exists():
            return ok(SYSTEM, "model", f"{path}; the first start reads it, and converts it where it has to")
        return problem(SYSTEM, "model", f"--model-path {path} is not on this machine", "name a folder that exists")
    return note(SYSTEM, "model", f"{name} is not on this machine; the first start downloads it from Hugging Face")


def converted() -> Iterator[Finding]:
    """Converted models whose bytes are not those that were written."""
    for folder in sorted((conversion.cache_folder() / "models").glob("*")):
        if folder.is_dir() and (reason := checksums.damage(folder, whole=True)):
            yield problem(SYSTEM, "converted", f"{folder.name} is damaged: {reason}", f"delete {folder}")


def drafter(asked: ServeConfig, plan: Plan) -> Finding:
    """The drafter, and why."""
    draft, wanted = plan.made.draft, asked.draft.speculative_algorithm
    if draft is None:
        return ok(SYSTEM, "drafter", "none, by --speculative-algorithm NONE: the target decodes plainly")
    name: str = draft.speculative_algorithm
    path = draft.speculative_draft_model_path
    if path is not None:
        name += " with the bundled head" if path == str(DEFAULT_HEAD) else f" with {checkpoint.display_name(path)}"
    if draft.speculative_ngram_beside:
        name += ", beside NGRAM"
    return ok(SYSTEM, "drafter", f"{name}, because {_why(asked, plan, wanted)}")


def _why(asked: ServeConfig, plan: Plan, wanted: str) -> str:
    """The reason for a drafter. wanted: --speculative-algorithm."""
    if wanted != "AUTO":
        return f"--speculative-algorithm names {wanted}"
    if asked.draft.speculative_draft_model_path is not None:
        return "the files of --speculative-draft-model-path are one (AUTO)"
    device = plan.config.target.device
    own = draft_has_own_place(choose_cores(asked), target_device=device, draft_device=asked.draft.draft_device)
    where = (
        "the draft service has a device or cores of its own" if own else "the draft service shares the target's cores"
    )
    if own and plan.config.draft.speculative_algorithm == "NGRAM":
        where += ", but the model has neither a bundled head nor MTP layers"
    return f"{where} (AUTO)"


def target_device(
    target: TargetConfig, found: Sequence[Gpu], torch: Facts, cores: str, name: str, *, auto: bool
) -> Finding:
    """Where a target computes, and why. name: of the replica. auto: no flag names its device."""
    used, where = target_gpus(target), f"CPU, cores {cores}"
    if not used:
        why = "there is no NVIDIA GPU (--device auto)" if auto else "--device cpu"
        return ok(SYSTEM, name, f"{where}, because {why}")
    names = ", ".join(f"cuda:{i}" for i in used)
    if missing := [i for i in used if found and i >= len(found)]:
        text = f"{names}: there is no GPU {missing[0]}; this machine has {len(found)}"
        return problem(SYSTEM, name, text, "name other devices with --device, or lower --tp-size")
    if not torch.get("available"):
        text = f"PyTorch cannot use {names} (see PyTorch)"
        if target.device == "auto":
            return note(SYSTEM, name, f"{where}, because {text}")
        return problem(SYSTEM, name, f"--device {target.device}: {text}", "mend PyTorch, or leave --device out")
    models = ", ".join(dict.fromkeys(found[i].name if found else "its memory is not known" for i in used))
    why = "--device auto takes a GPU where there is one" if auto else f"--device {target.device}"
    return ok(SYSTEM, name, f"{names} ({models}), because {why}")


def draft_device(draft: DraftConfig, targets: Sequence[TargetConfig], jax: Facts, cores: str, name: str) -> Finding:
    """Where a draft computes, and why. name: of the replica."""
    where = f"CPU, cores {cores}"
    if draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return ok(SYSTEM, name, f"{where}, because NGRAM looks tokens up and has no model")
    device, platform = draft.draft_device, jax.get("platform")
    if device == "auto" and platform == "tpu":
        return ok(SYSTEM, name, f"TPU ({jax['devices'][0]}), because JAX finds one (--draft-device auto)")
    if device.partition(":")[0] == "tpu" and platform not in (None, "tpu"):
        return problem(
            SYSTEM, name, f"--draft-device {device}: JAX finds no TPU", "run make -B install ACCELERATOR=tpu"
        )
    used = draft_gpus(draft)
    if not used:
        why = f"--draft-device {device}" if device != "auto" else "JAX has no GPU and no TPU here (--draft-device auto)"
        return ok(SYSTEM, name, f"{where if device in ('auto', 'cpu') else device}, because {why}")
    names = ", ".join(f"cuda:{i}" for i in used)
    if platform is not None and platform != "gpu":
        text = f"JAX cannot use {names} (see JAX)"
        if device == "auto":
            return note(SYSTEM, name, f"{where}, because {text}")
        return problem(SYSTEM, name, f"--draft-device {device}: {text}", "mend JAX, or name another --draft-device")
    if beside := [target for target in targets if set(used) & set(target_gpus(target))]:
        share = headroom_of(beside[0], draft).bytes / GIB
        where = f"{names}, beside {'the target' if len(targets) == 1 else 'a target'}"
        return ok(SYSTEM, name, f"{where}: {share:.2f} GiB of it are planned for the draft")
    return ok(SYSTEM, name, f"{names}, which {'the target does not use' if len(targets) == 1 else 'no target uses'}")


def ports(plan: Plan) -> Iterator[Finding]:
    """The ports of the gateway, and those of services that others reach."""
    gateway = plan.made.gateway
    used = [text for text in plan.obstacles if text.startswith("port ")]
    for text in used:
        yield problem(SYSTEM, "port", text)
    if not used:
        addresses = (host_and_port(gateway.host, port) for port in (gateway.port, gateway.grpc_port))
        yield ok(SYSTEM, "ports", f"{' (REST) and '.join(addresses)} (gRPC) are free")
    for name, service in plan.made.services:
        flag, address = f"--listen-{name.partition('-')[0]}", service.listen
        host, _, port = address.rpartition(":")
        if socket_path(address) is None and port.isdigit():
            try:
                take_port(host.strip("[]"), int(port), flag).close()
            except ConfigError as error:
                yield problem(SYSTEM, "port", error.message)


def memory(plan: Plan, found: Sequence[Gpu]) -> Iterator[Finding]:
    """The division of the target's memory, whether it is more than there is, and what other programs take of it."""
    for name, text in plan.memory.items():
        yield ok(MEMORY, name, text)
    for target in plan.made.targets:
        yield from _target_memory(target, found)


def _target_memory(target: TargetConfig, found: Sequence[Gpu]) -> Iterator[Finding]:
    used = target_gpus(target)
    if not used:
        return
    planned = plan_of(target, None)
    if planned is not None and (beyond := planned.planned - planned.total) > 0:
        yield problem(
            MEMORY, "too much",
            f"{planned.rule}: weights, cache, graphs, activations and a draft need {beyond / GIB:.2f} GiB too much",
            "lower that flag, or leave it out; the cache then takes what is left",
        )  # fmt: skip
    taken = max((found[i].used or 0 for i in used if i < len(found)), default=0)
    if taken < GIB:
        return
    who = f"other programs use {taken / GIB:.1f} GiB of the target's GPU"
    try:
        rest = plan_of(target, None, taken=taken)
    except ConfigError as error:
        yield problem(MEMORY, "in use", f"{who}: {error.message}", "end them, if they are not part of this system")
        return
    if rest is not None:
        yield note(MEMORY, "in use", f"{who}; beside them the KV cache holds {rest.tokens} tokens")
