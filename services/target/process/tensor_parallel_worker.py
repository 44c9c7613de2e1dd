"""`python -m services.target.process.tensor_parallel_worker RANK PORT FLAGS...`: a rank other than 0.

Rank 0 starts it and holds the other end of standard input; when that closes, for whatever reason, this process ends.
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
    rank, port = int(argv[0]), int(argv[1])
    config = tyro.cli(TargetConfig, args=argv[2:], prog=__name__)
    threading.Thread(target=_end_with_first_rank, daemon=True).start()
    setup_logging(f"target:{rank}", "warning")

    import torch.distributed as dist

    from services.target.model.loading.load import load
    from services.target.process import tensor_parallel as parallel

    store = dist.TCPStore(parallel.HOST, port, config.tp_size, is_master=False)
    channel = parallel.join(store, rank, config)
    try:
        model = load(Path(config.model_path), config)
    except ConfigError as error:  # rank 0 reports the same error, unless only this rank has it
        log.error("%s", error.message)
        return 2
    parallel.run_worker(model, channel)
    return 0


def _end_with_first_rank() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
