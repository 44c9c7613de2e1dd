"""`python -m services.target.process.ranks.worker RANK HOST:PORT FLAGS...`: a rank other than 0.

Its parent holds the other end of standard input; when that closes, for whatever reason, this process ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import tyro

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.telemetry import setup_logging

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Work until rank 0 ends. Returns the process's exit code."""
    rank, address = int(argv[0]), argv[1]
    config = tyro.cli(TargetConfig, args=argv[2:], prog=__name__)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    setup_logging(f"target:{rank}", "warning")

    from services.target.process.ranks.following import Follower
    from services.target.process.ranks.group import connect, join
    from services.target.process.ranks.loading import load_part

    try:
        channel = join(connect(address), rank, config)
        model = load_part(Path(config.model_path), config)
    except ConfigError as error:  # rank 0 reports the same error, unless only this rank has it
        log.error("%s", error.message)
        return 2
    Follower(model, channel).run()
    return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # the interpreter's own shutdown would wait for the thread that reads standard input
