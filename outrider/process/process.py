"""The frame around a process's work: logs, CPU cores, the event loop, and exit codes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from outrider.config import ProcessConfig, parse_cores
from outrider.errors import ConfigError, OutriderError
from outrider.telemetry import setup_logging

Config = TypeVar("Config", bound=ProcessConfig)


class LoadingAborted(Exception):
    """The process must stop while one of its threads does work that cannot be interrupted."""


def _unchanged(config: Config) -> Config:
    return config


def run(
    role: str,
    config: Config,
    serve: Callable[[Config], Coroutine[Any, Any, int]],
    share: Callable[[Config], Config] = _unchanged,
) -> int:
    """Run a process to its end. Returns its exit code: 2 for flags, files or ports that do not fit, 1 for other errors.

    If `serve` raises LoadingAborted, the process ends here with code 0.

    share: returns the configuration with "auto" cores replaced by the process's share of the machine. Numeric libraries
    must not be imported yet, because they read the number of their threads at import.
    """
    return run_plainly(role, config, lambda whole: uvloop.run(serve(whole)), share)


def run_plainly(
    role: str, config: Config, work: Callable[[Config], int], share: Callable[[Config], Config] = _unchanged
) -> int:
    """As `run`, without an event loop around the work."""
    setup_logging(role, config.log_level, config.log_format)
    try:
        config = share(config)
        take_cores(config.cores, config.niceness)
        return work(config)
    except OutriderError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except LoadingAborted:
        leave()


def leave() -> NoReturn:
    """End the process at once with code 0: the interpreter's own shutdown would interrupt threads that compute."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def take_cores(cores: str | None, niceness: int = 0) -> None:
    """Bind the process to CPU cores, with one thread a core. Raises ConfigError for cores that it may not use."""
    if not 0 <= niceness <= 19:
        raise ConfigError(f"--niceness must lie between 0 and 19, not {niceness}")
    if niceness:
        _lower_priority(niceness)
    if cores is None:
        return
    wanted = parse_cores(cores)
    missing = sorted(set(wanted) - os.sched_getaffinity(0))
    if missing or not wanted:
        raise ConfigError(f"--cores {cores}: this process may not use core {missing[0] if missing else cores}")
    os.sched_setaffinity(0, wanted)
    os.environ["OMP_NUM_THREADS"] = os.environ["NPROC"] = str(len(wanted))  # for PyTorch and for XLA


def _lower_priority(niceness: int) -> None:
    os.nice(niceness)
    # With autogroups, the kernel compares the niceness of groups, one a session, so the group must have it, too.
    group = Path("/proc/self/autogroup")
    if group.exists():
        with contextlib.suppress(OSError):
            group.write_text(str(niceness))
