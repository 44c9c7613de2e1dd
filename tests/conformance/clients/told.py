"""What a client's script shares: where the system is, and how a check is told. The standard library alone."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

URL = os.environ["URL"]
MODEL_FOLDER = os.environ["MODEL_FOLDER"]
BIN = os.environ["BIN"]


def _asked(route: str) -> Any:
    return json.load(urllib.request.urlopen(f"{URL}{route}", timeout=30))


MODEL = _asked("/v1/models")["data"][0]["id"]
GRPC_ADDRESS = f"{urllib.parse.urlsplit(URL).hostname}:{_asked('/get_server_info')['grpc_port']}"
TELLER = [{"role": "user", "content": "Name a city and its country."}]


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """Run a function at once, and tell what it returned, or how it failed."""

    def do(function: Callable[[], object]) -> None:
        try:
            found, ok = function(), True
        except Exception as error:  # whatever a client does when it does not understand
            found, ok = f"{type(error).__name__}: {error}", False
        words = "" if found is None else " ".join(str(found).split())
        with open(os.environ["TOLD"], "a") as file:
            file.write(json.dumps({"check": name, "ok": ok, "found": words[:300]}) + "\n")

    return do


def output_of(*command: str, **variables: str) -> str:
    """What a command of this environment writes. Raises RuntimeError with its last words if it fails.

    All of it lies in COMMAND.log of the client's working folder, the last call at the end.
    """
    full = [os.path.join(BIN, command[0]), *command[1:]]
    ended = subprocess.run(full, env=os.environ | variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    with open(f"{command[0]}.log", "a") as log:
        log.write(ended.stdout + ended.stderr)
    if ended.returncode:
        raise RuntimeError(" / ".join((ended.stdout + ended.stderr).strip().splitlines()[-6:]))
    return ended.stdout
