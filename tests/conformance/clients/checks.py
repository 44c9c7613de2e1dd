"""Shared by the clients' scripts: the address of the system, and reports of checks. Uses the standard library only."""

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
MESSAGES = [{"role": "user", "content": "Name a city and its country."}]


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """Run a function at once, and report its result, or its error."""

    def do(function: Callable[[], object]) -> None:
        try:
            found, ok = function(), True
        except Exception as error:  # clients raise errors of any type
            found, ok = f"{type(error).__name__}: {error}", False
        words = "" if found is None else " ".join(str(found).split())
        with open(os.environ["RESULTS"], "a") as file:
            file.write(json.dumps({"check": name, "ok": ok, "found": words[:300]}) + "\n")

    return do


def output_of(*command: str, **variables: str) -> str:
    """Output of a command in this environment. Raises RuntimeError with its last lines if it fails.

    The output is appended to COMMAND.log in the working folder of the client.
    """
    full = [os.path.join(BIN, command[0]), *command[1:]]
    ended = subprocess.run(full, env=os.environ | variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    with open(f"{command[0]}.log", "a") as log:
        log.write(ended.stdout + ended.stderr)
    if ended.returncode:
        raise RuntimeError(" / ".join((ended.stdout + ended.stderr).strip().splitlines()[-6:]))
    return ended.stdout
