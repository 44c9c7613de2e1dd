"""Memory of a GPU that the draft shares with a target: JAX must take what it uses, not three quarters at its start."""

import json
import os
import subprocess
import sys

import pytest

# Imports all of the drafter's code, then chooses a device, and prints what JAX's GPU plugin would be started with.
_CODE = """
import json, os
import services.draft.process.loading
from jax._src import xla_bridge
early = bool(xla_bridge._backends)
from services.draft.model.parallel.devices import choose_devices
choose_devices("cpu", 1)
from jaxlib import xla_client
options = xla_client.generate_pjrt_gpu_plugin_options()
print(json.dumps({"early": early, "preallocate": options["preallocate"]}))
"""


@pytest.mark.parametrize(("given", "preallocates"), [(None, False), ("true", True)])
def test_a_draft_does_not_reserve_a_gpus_memory(given, preallocates):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {} if given is None else {name: given}
    result = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(result.stdout.splitlines()[-1]) == {"early": False, "preallocate": preallocates}
