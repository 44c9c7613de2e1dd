"""`python -m gateway.process.worker INDEX COUNT FOLDER [flags of the gateway]`: one worker, started by its parent."""

import sys
from pathlib import Path

import tyro

from gateway.process.app import serve
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.process import process


def main(argv: list[str]) -> int:
    """Run a worker. Returns its exit code, as in gateway.process.app.main."""
    index, count, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    config = tyro.cli(GatewayConfig, args=argv[3:], prog="outrider gateway")
    return process.run(f"gateway.{index}", config, lambda whole: serve(whole, Peers(index, count, folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
