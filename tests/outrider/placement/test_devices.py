"""Memory of the machine, and of a container that has less."""

import pytest

from outrider.placement import devices
from outrider.placement.devices import free_host_memory, host_memory

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
    monkeypatch.setattr(devices, "_GROUPS", [(tmp_path, *names) for _, *names in devices._GROUPS])
    assert (free_host_memory(), host_memory()) == (free, total)
