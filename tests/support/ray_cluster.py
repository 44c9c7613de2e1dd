"""A Ray cluster of several nodes on this machine, and `outrider ray` on it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.gateway.services import until

_OBJECT_STORE = 80 << 20  # bytes, about the least that Ray takes
_WRAPPER = "parent_death.py"  # in the command line of a process that is about to become a service


class RayCluster:
    """A head without room for replicas, and nodes. Each node is a raylet with processes of its own."""

    def __init__(self):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets must be short
        # Ray notes the address of the cluster in this folder, which it only makes for a head without `temp_dir`.
        os.environ["RAY_TMPDIR"] = str(self.folder)
        (self.folder / "ray").mkdir()
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(self.folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": _OBJECT_STORE})
        self.nodes = {}

    def add(self, *names, cpus=4):
        for name in names:
            self.nodes[name] = self.cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=_OBJECT_STORE)
        self.cluster.wait_for_nodes()

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

        def removed():  # processes that are ending write their last lines
            shutil.rmtree(self.folder, ignore_errors=True)
            return not self.folder.exists()

        until(removed)

    def outrider(self, verb, *flags, seconds=240, code=0, **environment):
        """Run `outrider ray`. Returns its standard output and its standard error."""
        command = [sys.executable, "-m", "outrider", "ray", verb, *flags, "--address", self.cluster.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ | environment)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def status(self, name="outrider"):
        """The state of a pool."""
        shown, errors = self.outrider("status", "--json", "--name", name, code=None)
        assert shown, errors
        return json.loads(shown)

    def states(self, name="outrider", kind="target"):
        """State by unit and process of a kind."""
        return {
            (one["unit"], one["process"]): one["state"] for one in self.status(name)["units"] if one["kind"] == kind
        }


def command_lines():
    """The command lines of all processes, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def pid_of(kind, words):
    """The process of a service whose command line has these words."""

    def find():
        for pid, line in command_lines().items():
            if f"outrider {kind} " in line and words in line and _WRAPPER not in line:
                return pid
        return None

    return until(find)
