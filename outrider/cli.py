"""The command `outrider`: one verb a process, and helpers for people and for Docker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from outrider import __version__
from outrider.config import ServeConfig, ServiceTlsOptions, parse_flags
from outrider.errors import ConfigError, OutriderError
from outrider.process.imports import uncollected_imports

USAGE = """\
usage: outrider VERB [FLAGS]        (outrider VERB --help shows a verb's flags)

Speculative decoding for large language models, as services.

  serve         start all three processes on this machine and keep them alive
  target        start the target service: verifies proposals with the large model (PyTorch)
  draft         start the draft service: proposes tokens ahead of the target (JAX)
  gateway       start the gateway: OpenAI-style REST and gRPC for clients
  train         train a draft for a target: it writes answers, and a head learns to foretell them
  bench         measure: load on any server, drafters side by side, steps against their floors
  doctor        show versions, devices, cores, caches and models of this machine
  healthcheck   ask whether a service is up; the exit code is 0 if it is, 1 if not

  --version     show the version
"""

# Module of each process, found by name at run time because this package must not know them, and the extra it needs.
_PROCESSES = {
    "target": ("services.target.__main__", "target"),
    "draft": ("services.draft.__main__", "draft"),
    "gateway": ("gateway.__main__", "gateway"),
    "train": ("services.draft.train.__main__", "train"),
    "bench": ("bench.__main__", "bench"),
}


@dataclass(frozen=True)
class Healthcheck(ServiceTlsOptions):
    """Ask whether a service is up; the exit code is 0 if it is, 1 if not."""

    address: tyro.conf.Positional[str] = "http://127.0.0.1:30000"
    """host:port or unix:/path of a gRPC service, or http(s)://host:port of a gateway."""
    timeout: Annotated[float, tyro.conf.arg(aliases=["-t"])] = 2.0
    """Seconds to wait for the answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Returns the exit code: 0 done, 1 failed, 2 wrong flags or configuration, 130 for Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        print(f"outrider: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of a help page had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # before a process listens to signals, as while it imports what is large
        return 130


def _open_standard_streams() -> None:
    """Let those that are closed be of nothing.

    Whatever is opened next would have their numbers, and be written to for them; event loops abort the process then.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _dispatch(argv: list[str]) -> int:
    verbs: dict[str, Callable[[list[str]], int]] = {"serve": _serve, "doctor": _doctor, "healthcheck": _healthcheck}
    verb, flags = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if verb == "--version":
        print(f"outrider {__version__}")
        return 0
    if verb in _PROCESSES:
        return _run_process(verb, flags)
    if verb in verbs:
        return verbs[verb](flags)
    known = ", ".join([*_PROCESSES, *verbs])
    raise ConfigError(f'there is no verb "{verb}"; choose one of {known}')


def _run_process(verb: str, flags: list[str]) -> int:
    name, extra = _PROCESSES[verb]
    try:
        with uncollected_imports():
            module = importlib.import_module(name)
        return int(module.main(flags) or 0)  # which imports what is large
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or importlib.util.find_spec(missing) is not None:  # a part of it is missing, or broken
            raise
        raise ConfigError(
            f"the {verb} needs {missing}, which is not installed; run `make install`, "
            f'or `pip install "outrider[{extra}]"`'
        ) from error


def _serve(flags: list[str]) -> int:
    from outrider.supervisor.app import serve

    return serve(parse_flags(ServeConfig, flags, "outrider serve"))


def _doctor(flags: list[str]) -> int:
    from outrider.supervisor.doctor import report

    for name, fact in tyro.cli(report, prog="outrider doctor", args=flags):
        print(f"{name:<14} {fact}")
    return 0


def _healthcheck(flags: list[str]) -> int:
    from outrider.supervisor.health import is_healthy

    ask = tyro.cli(Healthcheck, prog="outrider healthcheck", args=flags)
    healthy = asyncio.run(is_healthy(ask.address, ask.timeout, tls=ask.service_tls()))
    print("healthy" if healthy else f"{ask.address} is not healthy", file=sys.stdout if healthy else sys.stderr)
    return 0 if healthy else 1
