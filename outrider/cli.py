"""The command `outrider`: one verb for each process, and helpers for people and for Docker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from outrider import __version__
from outrider.config import DoctorConfig, ServeConfig, ServiceTlsOptions, ServiceTokenOptions, read_flags
from outrider.errors import ConfigError, OutriderError
from outrider.process.garbage_collection import imports_without_gc

USAGE = """\
usage: outrider VERB [FLAGS]        (outrider VERB --help shows the most used flags, --help-all every flag)

Speculative decoding for large language models, as services.

  serve         start all three processes on this machine and restart them when they end
  target        start the target service: verifies proposals with the large model (PyTorch)
  draft         start the draft service: proposes tokens ahead of the target (JAX)
  gateway       start the gateway: OpenAI-style REST and gRPC for clients
  train         train a draft model for a target on answers that the target generates
  bench         benchmark: load on any server, drafters side by side, steps against their floors
  ray           targets, drafts and gateways on a Ray cluster: ray up, ray status, ray down
  doctor        report what each service would run on here, why, and what to do about problems
  healthcheck   check the health of a service; the exit code is 0 if it is healthy, 1 if not
  token         write the token of the services into a file, unless it exists

  --version     show the version
"""

# Module and extra of each process. Imported by name at run time, because this package must not depend on them.
_PROCESSES = {
    "target": ("services.target.__main__", "target"),
    "draft": ("services.draft.__main__", "draft"),
    "gateway": ("gateway.__main__", "gateway"),
    "train": ("services.draft.train.__main__", "train"),
    "bench": ("bench.__main__", "bench"),
}


@dataclass(frozen=True)
class Healthcheck(ServiceTokenOptions, ServiceTlsOptions):
    """Check the health of a service; the exit code is 0 if it is healthy, 1 if not."""

    address: tyro.conf.Positional[str] = "http://127.0.0.1:30000"
    """host:port or unix:/path of a gRPC service, or http(s)://host:port of a gateway."""
    timeout: Annotated[float, tyro.conf.arg(aliases=["-t"])] = 2.0
    """Maximum wait for the answer, in seconds."""


@dataclass(frozen=True)
class TokenFile:
    """Write the token that target and draft services require of their callers into a file that only this user can read.

    A file that exists stays as it is, except that OUTRIDER_SERVICE_TOKEN replaces its content, if it is set.
    """

    file: tyro.conf.Positional[Path]
    """Path of the file, for --service-token-file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Returns the exit code: 0 success, 1 failure, 2 wrong flags or configuration, 130 Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        print(f"outrider: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of a help page closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # before a process handles signals, for example during large imports
        return 130


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null.

    Otherwise the next opened file would get the number of a closed stream and its output; event loops then abort.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _dispatch(argv: list[str]) -> int:
    verbs: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "ray": _ray,
        "doctor": _doctor,
        "healthcheck": _healthcheck,
        "token": _token,
    }
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
        with imports_without_gc():
            module = importlib.import_module(name)
        return int(module.main(flags) or 0)  # imports large libraries
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or importlib.util.find_spec(missing) is not None:  # the extra is installed, but broken
            raise
        raise ConfigError(
            f"the {verb} needs {missing}, which is not installed; run `make install`, "
            f'or `pip install "outrider[{extra}]"`'
        ) from error


def _serve(flags: list[str]) -> int:
    config, notes = read_flags(ServeConfig, flags, "outrider serve")
    if config.dry_run != "off":
        from outrider.supervisor.dry_run import dry_run

        print(dry_run(config, notes))
        return 0
    from outrider.supervisor.app import serve

    return serve(config, notes)


def _ray(flags: list[str]) -> int:
    from outrider.clusters.ray.commands import main as ray

    return ray(flags)


def _doctor(flags: list[str]) -> int:
    config, notes = read_flags(DoctorConfig, flags, "outrider doctor")
    from outrider.doctor.report import doctor

    text, code = doctor(config, notes, flags)
    print(text)
    return code


def _healthcheck(flags: list[str]) -> int:
    from outrider.supervisor.health import is_healthy

    ask = tyro.cli(Healthcheck, prog="outrider healthcheck", args=flags)
    healthy = _run(is_healthy(ask.address, ask.timeout, tls=ask.service_tls(), token=ask.service_token()))
    print("healthy" if healthy else f"{ask.address} is not healthy", file=sys.stdout if healthy else sys.stderr)
    return 0 if healthy else 1


def _run(asking: Coroutine[Any, Any, bool]) -> bool:
    """Run a coroutine; Ctrl-C raises KeyboardInterrupt at once.

    asyncio.run itself may miss a signal that arrives just before the event loop begins to wait. A handler of the loop
    wakes it by a file descriptor.
    """

    async def interruptible() -> bool:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that runs is a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await asking

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _token(flags: list[str]) -> int:
    from outrider.service_token import make_token_file

    make_token_file(tyro.cli(TokenFile, prog="outrider token", args=flags).file)
    return 0
