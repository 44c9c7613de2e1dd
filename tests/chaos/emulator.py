"""The network of the campaign, as a process: a namespace with a TUN device for each node, and the packets between them.

It reads whole IP packets from the devices and writes each to the device of its destination, after what the rules of
both nodes do to it: delay, loss, reordering, a limited rate, nothing at all. TCP above them is the kernel's own. So it
needs neither netem nor netfilter, and when it ends, the kernel removes the namespaces.

`python -m tests.chaos.emulator SEED NODE...` prints one line of JSON: its descriptor of each node's namespace. Then
each line of JSON on standard input sets the rules, by node, and is answered with a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SUBNET = "198.18.77"  # of the range for benchmarks (RFC 2544), which is routed nowhere
CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BACKLOG = 0.25  # seconds that packets wait for a limited rate; later ones are dropped, as by a router
_OVERTAKEN = (0.005, 0.04)  # seconds for which a reordered packet is held
_AT_ONCE = 64  # packets of a node before the next node's turn


def enter_namespace(path: str) -> None:
    """Move this thread into the network namespace of a file. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)


def address_of(nodes: Sequence[str], node: str) -> str:
    """The IP address of a node."""
    return f"{SUBNET}.{nodes.index(node) + 1}"


@dataclass(frozen=True)
class Rule:
    """What happens to a node's packets, in both directions.

    delay: seconds each way. loss, reordered: shares of the packets. rate: bytes per second each way, 0 without a limit
    """

    cut: bool = False
    delay: float = 0.0
    loss: float = 0.0
    reordered: float = 0.0
    rate: float = 0.0


class Wire:
    """Decides when a packet arrives, or that it does not. Times are seconds of one clock."""

    def __init__(self, seed: int, rules: dict[str, Rule]) -> None:
        self.rules = rules
        self._random = random.Random(seed)
        self._free: dict[tuple[str, bool], float] = {}  # when a limited rate has sent what it took

    def arrival(self, source: str, destination: str, size: int, now: float) -> float | None:
        """When a packet of `size` bytes that leaves now arrives; None if it is lost."""
        due = now
        for node, leaves in ((source, True), (destination, False)):
            rule = self.rules.get(node)
            if rule is None:
                continue
            if rule.cut or self._random.random() < rule.loss:
                return None
            due += rule.delay
            if self._random.random() < rule.reordered:
                due += self._random.uniform(*_OVERTAKEN)
            if rule.rate:
                free = max(now, self._free.get((node, leaves), 0.0))
                if free - now > _BACKLOG:
                    return None
                self._free[node, leaves] = free = free + size / rule.rate
                due += free - now
        return due


def _open_node(address: str) -> tuple[int, int]:
    """A new namespace with a TUN device at an address: descriptors of the device and of the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace can be made; run the campaign as root")
    space = os.open("/proc/self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"chaos", _IFF_TUN | _IFF_NO_PI))
    for words in (f"addr add {address}/24 dev chaos", "link set chaos up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device, space


class Relay:
    """Moves packets between devices."""

    def __init__(self, devices: dict[str, int], wire: Wire, clock: Callable[[], float] = time.monotonic) -> None:
        """devices: descriptors by node."""
        self._devices, self._wire, self._clock = devices, wire, clock
        self._nodes = {bytes(map(int, address_of(list(devices), node).split("."))): node for node in devices}
        self._waiting: list[tuple[float, int, int, bytes]] = []  # due, number, device, packet
        self._numbers = itertools.count()

    def read(self, node: str) -> None:
        """Take what a node has sent."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._devices[node], 1 << 16)
            except BlockingIOError:
                return
            destination = self._nodes.get(packet[16:20]) if packet[:1] == b"\x45" else None
            if destination is None:  # IPv6, broadcasts
                continue
            now = self._clock()
            due = self._wire.arrival(node, destination, len(packet), now)
            if due is not None:
                heapq.heappush(self._waiting, (due, next(self._numbers), self._devices[destination], packet))

    def deliver(self) -> float | None:
        """Write what is due. Returns seconds until the next packet is, None without one."""
        while self._waiting:
            wait = self._waiting[0][0] - self._clock()
            if wait > 0:
                return wait
            _, _, device, packet = heapq.heappop(self._waiting)
            with contextlib.suppress(BlockingIOError):  # the queue of the device is full: lost, as on any link
                os.write(device, packet)
        return None


def main(seed: int, nodes: Sequence[str]) -> None:
    """Relay packets until standard input ends."""
    opened = {node: _open_node(address_of(nodes, node)) for node in nodes}
    devices = {node: device for node, (device, _) in opened.items()}
    wire = Wire(seed, {})
    relay = Relay(devices, wire)
    print(json.dumps({node: space for node, (_, space) in opened.items()}), flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, None)
        for node, device in devices.items():
            selector.register(device, selectors.EVENT_READ, node)
        while True:
            for key, _ in selector.select(relay.deliver()):
                if key.data is not None:
                    relay.read(key.data)
                    continue
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                wire.rules = {node: Rule(**rule) for node, rule in json.loads(line).items()}
                print("set", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
