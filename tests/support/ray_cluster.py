"""A Ray cluster of several nodes on this machine, and `outrider ray` on it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.gateway.services import until

OBJECT_STORE = 80 << 20  # bytes, the smallest that Ray takes


class RayCluster:
    """A head without resources for actors, and nodes. Each node is a raylet with processes of its own."""

    def __init__(self):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets must be short
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(self.folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": OBJECT_STORE})
        self.nodes = {}

    def add(self, name, cpus):
        self.nodes[name] = self.cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE)

    def kill(self, name):
        """End a node at once, with all its processes, as when its machine loses power."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def node_of(self, pid):
        """The name of the node that a process belongs to."""
        raylets = {node.all_processes["raylet"][0].process.pid: name for name, node in self.nodes.items()}
        while pid > 1:
            if pid in raylets:
                return raylets[pid]
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        raise AssertionError("no node has the process")

    def stop(self):
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def outrider(self, *words, seconds=120, code=0):
        """Run `outrider ray`. Returns its output."""
        command = [sys.executable, "-m", "outrider", "ray", *words, "--address", self.cluster.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self, name="outrider"):
        """The state of a pool."""
        command = [sys.executable, "-m", "outrider", "ray", "status", "--json", "--name", name]
        done = subprocess.run([*command, "--address", self.cluster.address], capture_output=True, text=True, timeout=60)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)


def command_lines():
    """The command lines of all processes, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def pid_of(kind, address):
    """The process of a service that listens on an address."""
    wanted = f"outrider {kind} "

    def found():
        lines = command_lines().items()
        fitting = (pid for pid, line in lines if wanted in line and address in line and "parent_death" not in line)
        return next(fitting, None)

    return until(found)
