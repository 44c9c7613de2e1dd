"""`python -m tests.support.system.trainer PORT SIZE FOLDER`: a trainer that broadcasts a checkpoint's tensors.

It makes its process group as slime does, and then broadcasts what each line of standard input names: a JSON list of
tensors, one by one, or all as one flat tensor behind the word `flat`.
"""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

GROUP = "slime-pp_0"
_TIMEOUT = timedelta(seconds=60)


def joined(port, size):
    """The group of this name, as rank 0."""
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=_TIMEOUT))
    store.set_timeout(_TIMEOUT)
    group, _ = distributed_c10d._new_process_group_helper(
        size, 0, [], dist.Backend("gloo"), dist.PrefixStore(GROUP, store), group_name=GROUP, timeout=_TIMEOUT
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


class Trainer:
    """This module as a process."""

    def __init__(self, port, folder, size=2):
        command = [sys.executable, "-m", "tests.support.system.trainer", str(port), str(size), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def broadcast(self, names, *, flat=False):
        self._process.stdin.write(("flat " if flat else "") + json.dumps(names) + "\n")
        self._process.stdin.flush()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def main(port, size, folder):
    group = joined(int(port), int(size))
    tensors = load_file(Path(folder) / "model.safetensors")
    for line in sys.stdin:
        names = json.loads(line.removeprefix("flat "))
        chosen = [tensors[name].contiguous() for name in names]
        flat = line.startswith("flat ")
        for tensor in [torch.cat([one.flatten() for one in chosen])] if flat else chosen:
            dist.broadcast(tensor, 0, group=group)


if __name__ == "__main__":
    main(*sys.argv[1:])
