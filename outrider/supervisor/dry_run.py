"""`outrider serve --dry-run`: what would be started, without starting, downloading or contacting anything.

The same functions as those of the real start resolve the flags; their log lines become the notes. Flags come first that
the command line sets, then those that follow from others or from this machine, then defaults.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from outrider.config import DraftConfig, GatewayConfig, ProcessConfig, ServeConfig, TargetConfig, flag_of, to_argv
from outrider.config.compatibility.on_cpu import FLOAT16_NOTE, for_cpu
from outrider.errors import ConfigError
from outrider.placement.cores import choose_cores
from outrider.placement.memory import GIB
from outrider.supervisor.app import Processes, check_ports, check_values, configure
from outrider.supervisor.memory import headroom_of, plan_of
from outrider.supervisor.resolution import resolve_config, target_on_cpu

_RUNTIME = Path("PRIVATE-FOLDER")  # stands for the folder of the sockets
_SECRETS = {"api_key": ("HIDDEN",), "admin_api_key": "HIDDEN"}
_ORDER = ("set", "derived", "default")
_WIDTH, _INDENT = 120, 11
_DRAFT_CHECKS = "services.draft.process.flags"  # imported by name, because this package must not depend on it

Source = Literal["set", "derived", "default"]


@dataclass(frozen=True)
class Setting:
    """The resolved value of a flag, and where it comes from."""

    flag: str
    value: Any
    source: Source

    @property
    def words(self) -> str:
        """The value as text."""
        return _words(self.value)

    def __str__(self) -> str:
        return f"{self.flag} {self.words}"


@dataclass(frozen=True)
class ProcessPlan:
    """A process that would be started. argv: its flags. like: the first replica of its service, if it is another."""

    device: str
    cores: str
    settings: list[Setting]
    argv: list[str]
    like: str | None = None


@dataclass
class Plan:
    """All that a dry run shows. memory: names and values. obstacles: those of the warnings that prevent a start now.

    config, made: the flags as this machine follows them, and the configurations of the processes
    """

    processes: dict[str, ProcessPlan]
    memory: dict[str, str]
    config: ServeConfig
    made: Processes
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)


def dry_run(config: ServeConfig, notes: Sequence[str] = ()) -> str:
    """What `outrider serve` would start with these flags, as text or JSON. Raises ConfigError as the start would.

    notes: about the command line
    """
    plan = make_plan(config, notes)
    return _json(plan) if config.dry_run == "json" else _text(plan)


def make_plan(config: ServeConfig, notes: Sequence[str] = ()) -> Plan:
    """The plan of a configuration. Raises ConfigError."""
    with _captured() as records:
        resolved = resolve_config(config)
        check_values(resolved)
        made = configure(resolved, choose_cores(resolved), _RUNTIME)
        for draft in made.drafts:
            _check_draft(draft)
    reports = {
        level: [r.getMessage() for r in records if (r.levelno >= logging.WARNING) == level] for level in (True, False)
    }
    given = _given(config)
    configs: list[tuple[str, str, ProcessConfig]] = [
        (name, _target_device(one, resolved) if isinstance(one, TargetConfig) else _draft_device(one), one)
        for name, one in made.services
    ]
    configs.append(("gateway", "CPU", made.gateway))
    firsts = {name: f"{name.partition('-')[0]}-1" for name, _, _ in configs if "-" in name}
    processes = {
        name: ProcessPlan(
            device, one.cores or "all", _settings(one, given), _argv(one),
            like=firsts[name] if firsts.get(name, name) != name else None,
        )
        for name, device, one in configs
    }  # fmt: skip
    obstacles = [*_missing_files(made), *_used_ports(made.gateway)]
    warnings = [*notes, *reports[True], *_cpu_notes(resolved), *obstacles]
    return Plan(processes, _memory(made), resolved, made, reports[False], warnings, obstacles)


class _Collector(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@contextlib.contextmanager
def _captured() -> Iterator[list[logging.LogRecord]]:
    """Collect the log records of this package in place of writing them."""
    logger, collector = logging.getLogger("outrider"), _Collector()
    before = logger.level, logger.propagate
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield collector.records
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before[0])
        logger.propagate = before[1]


# --- flags ---


def _given(config: object) -> dict[str, Any]:
    """The values of the command line that are no defaults, by field."""
    found: dict[str, Any] = {}
    for one in fields(config):  # type: ignore[arg-type]
        value = getattr(config, one.name)
        if is_dataclass(value):
            found |= _given(value)
        elif value != one.default:
            found[one.name] = value
    return found


def _settings(config: ProcessConfig, given: Mapping[str, Any]) -> list[Setting]:
    """Every flag of a process: those that are set first, then derived ones, then defaults."""
    settings = []
    for one in fields(config):
        value = getattr(config, one.name)
        source: Source = "derived"
        if value == one.default:
            source = "default"
        elif given.get(one.name) == value:
            source = "set"
        shown = _SECRETS[one.name] if one.name in _SECRETS and value else value
        settings.append(Setting(flag_of(one.name), shown, source))
    return sorted(settings, key=lambda setting: _ORDER.index(setting.source))


def _argv(config: ProcessConfig) -> list[str]:
    hidden = {name: secret for name, secret in _SECRETS.items() if getattr(config, name, None)}
    return to_argv(replace(config, **hidden))  # type: ignore[arg-type]


def _words(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- machine ---


def _target_device(target: TargetConfig, config: ServeConfig) -> str:
    on_cpu = target_on_cpu(config)
    device = target.device
    if device == "auto":
        device = f"{'CPU' if on_cpu else 'cuda'}, found by --device auto"
    if target.tp_size == 1:
        return device
    machines = f" on {target.nnodes} machines" if target.nnodes > 1 else ""
    return f"{device}; {target.tp_size} tensor-parallel {'processes' if on_cpu else 'devices'}{machines}"


def _draft_device(draft: DraftConfig) -> str:
    if draft.speculative_algorithm == "NGRAM":
        return "CPU"
    device = draft.draft_device
    device = "the first kind that JAX finds: TPU, GPU, CPU (--draft-device auto)" if device == "auto" else device
    return device if draft.draft_tp_size == 1 else f"{device}; {draft.draft_tp_size} tensor-parallel devices"


def _cpu_notes(config: ServeConfig) -> list[str]:
    """What the target will log on a CPU."""
    if not target_on_cpu(config):
        return []
    float16 = FLOAT16_NOTE.format("bfloat16, or in float32 for models without kernels for it")
    return [*for_cpu(config.target)[1], *([float16] if config.target.dtype == "float16" else [])]


def _missing_files(made: Processes) -> list[str]:
    """Local folders and files that are not there; another machine may have them."""
    draft = made.draft
    paths = [("--model-path", made.target.model_path)]  # the replicas of a service have the same
    if draft is not None:
        paths.append(("--speculative-draft-model-path", draft.speculative_draft_model_path or ""))
    local = [(flag, path) for flag, path in paths if path.startswith(("/", "./", "../", "~")) or path.endswith(".gguf")]
    return [f"{flag} {path} is not on this machine" for flag, path in local if not Path(path).expanduser().exists()]


def _used_ports(gateway: GatewayConfig) -> list[str]:
    """The ports that another process uses now; it may have ended when the system starts."""
    try:
        check_ports(gateway)
    except ConfigError as error:
        return [error.message]
    return []


def _check_draft(draft: DraftConfig) -> None:
    """The draft service's own checks of its flags, if it is installed. Raises ConfigError."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_DRAFT_CHECKS).check(draft)


def _memory(made: Processes) -> dict[str, str]:
    """The memory plan of each replica, as far as it is known here. Raises ConfigError if a KV cache has no room."""
    found = {}
    for name, one in made.services:
        text = _target_memory(one) if isinstance(one, TargetConfig) else _draft_memory(one, made.targets)
        if text is not None:
            found[name] = text
    return found


def _target_memory(target: TargetConfig) -> str:
    plan = plan_of(target, None)
    if plan is not None:
        return str(plan)
    names = ("mem_fraction_static", "max_total_tokens", "page_size", "kv_cache_dtype")
    flags = ", ".join(f"{flag_of(name)} {_words(getattr(target, name))}" for name in names)
    why = "its checkpoint or its GPU is not on this machine"
    return f"measured at the start, because {why}; by {flags}"


def _draft_memory(draft: DraftConfig, targets: Sequence[TargetConfig]) -> str | None:
    """The draft's share of a device; None for a draft with a device of its own."""
    if (headroom := max(headroom_of(target, draft).bytes for target in targets)) > 0:
        return f"{headroom / GIB:.2f} GiB of {'the target' if len(targets) == 1 else 'a target'}'s device"
    share = draft.draft_memory_bytes
    return None if share is None else f"{share / GIB:.2f} GiB of its device"


# --- output ---


def _text(plan: Plan) -> str:
    lines = ["Dry run: nothing is started, downloaded or contacted. `outrider serve` would start:"]
    for name, process in plan.processes.items():
        lines += ["", name, _row("device", process.device), _row("cores", process.cores)]
        if process.like is not None:
            others = set(map(str, plan.processes[process.like].settings))
            differ = [str(one) for one in process.settings if one.source != "default" and str(one) not in others]
            lines.append(_row("flags", f"those of {process.like}, but for {'  '.join(differ)}"))
            continue
        for source in _ORDER:
            settings = [str(setting) for setting in process.settings if setting.source == source]
            if source == "default":
                lines.append(_row(source, "  ".join(one.replace(" ", "\0") for one in settings)).replace("\0", " "))
            else:
                lines += [_row(source if i == 0 else "", one) for i, one in enumerate(settings)]
    lines += ["", "memory", *(_row(name, value) for name, value in plan.memory.items())]
    for title, texts in (("notes", plan.notes), ("warnings", plan.warnings)):
        lines += ["", title, *(_row("-", text) for text in texts)] if texts else []
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    """A name and a value, which is wrapped below itself."""
    indent = 4 if name == "-" else _INDENT
    width = max(60, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns))
    first = f"  {name}".ljust(indent)
    wrapped = textwrap.wrap(
        value, width, initial_indent=first, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(wrapped) if wrapped else first.rstrip()


def _json(plan: Plan) -> str:
    processes = {
        name: {
            "device": process.device,
            "cores": process.cores,
            "flags": {
                one.flag.removeprefix("--"): {"value": one.value, "source": one.source} for one in process.settings
            },
            "argv": process.argv,
        }
        for name, process in plan.processes.items()
    }
    whole = {"processes": processes, "memory": plan.memory, "notes": plan.notes, "warnings": plan.warnings}
    return json.dumps(whole, indent=2)
