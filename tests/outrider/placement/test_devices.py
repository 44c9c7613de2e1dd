"""Memory of the machine, and of a container that has less."""

import pytest

from outrider.placement import devices
from outrider.placement.devices import free_host_memory, host_memory
from tests.support.gpu_machine import H100, L4, put_gpus, smi

GIB = 1 << 30
V2 = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
V1 = {"memory.limit_in_bytes": f"{4 * GIB}", "memory.usage_in_bytes": f"{3 * GIB}",
      "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n"}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """A machine with 64 GiB, 32 of which are free."""
    monkeypatch.setattr(devices, "_free_on_machine", lambda: 32 * GIB)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(devices.os, "sysconf", pages.__getitem__)


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        (V2, 2 * GIB, 4 * GIB),
        (V1, 2 * GIB, 4 * GIB),
        (V2 | {"memory.max": "max\n"}, 32 * GIB, 64 * GIB),
        (V1 | {"memory.limit_in_bytes": "9223372036854771712"}, 32 * GIB, 64 * GIB),
        (V2 | {"memory.current": f"{7 * GIB}"}, 0, 4 * GIB),
        ({}, 32 * GIB, 64 * GIB),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, machine, files, free, total):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(devices, "GROUPS", [(tmp_path, *names) for _, *names in devices.GROUPS])
    assert (free_host_memory(), host_memory()) == (free, total)


CARDS = smi(H100, L4, "NVIDIA GB10, [N/A], [N/A], [N/A], 12.1, 580.95.05")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H100 80GB HBM3", "NVIDIA L4", "NVIDIA GB10"]),
        ("1,0", ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]),
        ("GPU-00000001", ["NVIDIA L4"]),
        ("0,7,1", ["NVIDIA H100 80GB HBM3"]),
        ("MIG-00000000", []),
        ("", []),
    ],
)
def test_gpus_are_numbered_as_programs_see_them(visible, names):
    found = devices.parse_gpus(CARDS, visible)
    assert [gpu.name for gpu in found] == names
    assert [gpu.index for gpu in found] == list(range(len(names)))


def test_a_gpus_memory_is_what_programs_can_use():
    hopper, ada, shared = devices.parse_gpus(CARDS)
    assert hopper.total == (81559 - 551) << 20  # 79.1 GiB, as PyTorch reports it
    assert (hopper.capability, hopper.driver_branch, ada.driver_branch) == ((9, 0), 580, 550)
    assert (shared.total, shared.used) == (None, None)
    assert devices.parse_gpus("No devices were found\n") == []


def test_gpus_are_counted_only_where_the_process_may_use_them(monkeypatch, tmp_path):
    put_gpus(monkeypatch, tmp_path, H100, L4, visible="1")
    assert [gpu.name for gpu in devices.gpus()] == ["NVIDIA L4"]
    assert devices.gpu_memory() == (23034 - 494) << 20
    assert devices.gpu_memory(1) is None
    assert len(devices.gpus(hidden=True)) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.gpus() == []


def test_the_pci_bus_has_devices_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    kinds = [("0x10de", "0x2330", "0x030200"), ("0x10de", "0x22a3", "0x068000"), ("0x1ae0", "0x0063", "0x120000")]
    for i, words in enumerate(kinds):
        (tmp_path / str(i)).mkdir()
        for name, word in zip(("vendor", "device", "class"), words, strict=True):
            (tmp_path / str(i) / name).write_text(word + "\n")
    assert (devices.nvidia_devices(), devices.tpu_chips()) == (1, 1)
