"""Memory of GPUs beside a target: JAX takes what it uses, within its share, and keeps to its own devices."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jaxlib import xla_client

from outrider.errors import ConfigError
from outrider.placement.devices import parse_gpus
from services.draft.model.parallel import devices
from services.draft.model.parallel.devices import choose_devices
from tests.support.gpu_machine import H100, smi

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


@pytest.fixture
def four_gpus(monkeypatch):
    """JAX on a machine with four GPUs, whose plugin is not started. Returns a function with that start's options."""
    monkeypatch.setattr(devices, "gpus", lambda: parse_gpus(smi(*[H100] * 4)))
    settings = {"jax_cuda_visible_devices": "all"}

    def visible():
        value = settings["jax_cuda_visible_devices"]
        return list(range(4)) if value == "all" else [int(i) for i in value.split(",")]

    monkeypatch.setattr(
        devices.jax, "devices", lambda _=None: [SimpleNamespace(platform="gpu", id=i) for i in visible()]
    )
    assert settings.keys() <= devices.jax.config.values.keys()
    monkeypatch.setattr(devices.jax.config, "update", settings.__setitem__)
    others = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    monkeypatch.setattr(os, "environ", others)
    monkeypatch.setattr(os, "getenv", others.get)
    return lambda: {"visible": visible()} | xla_client.generate_pjrt_gpu_plugin_options()


@pytest.mark.parametrize(
    ("device", "count", "share", "chosen", "fraction"),
    [
        ("cuda:2", 1, None, [2], None),
        ("cuda:1", 2, 4 << 30, [1, 2], 0.1011),
        ("cuda:3,cuda:1", 2, 4 << 30, [3, 1], 0.1011),
        ("auto", 1, 4 << 30, [0], 0.1011),
    ],
)
def test_a_draft_keeps_to_its_gpus_and_its_share(four_gpus, device, count, share, chosen, fraction):
    for _ in range(2):  # a draft that could not be loaded is loaded again in the same process
        assert [one.id for one in choose_devices(device, count, share=share)] == chosen
    options = four_gpus()
    assert (options["visible"], options.get("memory_fraction")) == (chosen, fraction)
    assert options["preallocate"] is False


def test_a_fraction_that_is_set_stays(four_gpus, monkeypatch):
    monkeypatch.setitem(os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    choose_devices("cuda:0", 1, share=4 << 30)
    assert four_gpus()["memory_fraction"] == 0.3


def test_gpus_that_the_machine_lacks_are_refused(four_gpus):
    with pytest.raises(ConfigError, match="cuda:3 and --draft-tp-size 2 need 5 devices; there are 4 of kind gpu"):
        choose_devices("cuda:3", 2)
    with pytest.raises(ConfigError, match="cuda:1,cuda:5 and --draft-tp-size 2 need 6 devices; there are 4"):
        choose_devices("cuda:1,cuda:5", 2)
    assert four_gpus()["visible"] == [0, 1, 2, 3]
