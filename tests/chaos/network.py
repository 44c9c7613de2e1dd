"""The emulated network, seen from the campaign: its process, the namespaces, the rules of the moment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from bench.harness.errors import BenchError
from bench.harness.processes import running
from tests.chaos.emulator import Rule, address_of, enter_namespace

NODES = ("client", "gateway", "target", "draft")


class Network:
    """A running emulator. The calling thread, and processes and threads that it starts, are the node "client"."""

    def __init__(self, process: subprocess.Popen[bytes], nodes: Sequence[str]) -> None:
        self._process, self._nodes = process, nodes
        descriptors = json.loads(self._answer())
        self.spaces = {node: f"/proc/{process.pid}/fd/{number}" for node, number in descriptors.items()}
        enter_namespace(self.spaces["client"])

    def inside(self, node: str, command: list[str]) -> list[str]:
        """The command, run in the namespace of a node. Its process id is that of the wrapped command."""
        return ["nsenter", f"--net={self.spaces[node]}", "--", *command]

    def address(self, node: str) -> str:
        """The IP address of a node."""
        return address_of(self._nodes, node)

    def set(self, rules: Mapping[str, Rule]) -> None:
        """Replace all rules; nodes without one have an ideal network."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({node: asdict(rule) for node, rule in rules.items()}).encode() + b"\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the network cannot be emulated; the campaign needs root, /dev/net/tun, ip and nsenter")
        return line


@contextlib.contextmanager
def network(seed: int, nodes: Sequence[str] = NODES) -> Iterator[Network]:
    """The emulated network for the duration of the context. nodes: "client" is one of them."""
    command = [sys.executable, "-m", "tests.chaos.emulator", str(seed), *nodes]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Network(process, nodes)


def address(node: str) -> str:
    """The IP address of a node."""
    return address_of(NODES, node)
