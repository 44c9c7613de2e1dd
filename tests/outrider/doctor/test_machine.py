"""What the doctor says of a machine's devices."""

import pytest

from outrider.doctor import machine
from outrider.doctor.findings import as_json, as_text, exit_code, note, ok, problem
from outrider.placement.devices import parse_gpus
from tests.support.gpu_machine import H100, L4, OLD, V100, smi

AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni"


@pytest.mark.parametrize(
    ("cards", "hidden", "others", "statuses", "text"),
    [
        ([H100], [H100], {}, ["ok"], "79.1 GiB, compute capability 9.0, driver 580.65.06"),
        ([L4], [L4], {}, ["ok"], "driver 550.54.15"),
        ([V100], [V100], {}, ["note"], "no fast bfloat16"),
        ([OLD], [OLD], {}, ["problem"], "runs neither CUDA 12 nor 13"),
        ([H100], [H100, H100], {}, ["ok", "note"], "leaves 1 of 2 GPUs"),
        ([], [H100], {}, ["note"], "leaves 0 of 1 GPUs"),
        ([], [], {"on_bus": 2}, ["problem"], "2 NVIDIA GPUs on the PCI bus, but no driver"),
        ([], [], {}, ["ok"], "none of NVIDIA"),
        ([], [], {"driver": True, "on_bus": 1}, ["note"], "nvidia-smi does not answer"),
        ([], [], {"tpus": 4}, ["ok", "ok"], "4 chips"),
    ],
)
def test_devices(cards, hidden, others, statuses, text):
    found = list(machine.accelerators(parse_gpus(smi(*cards)), parse_gpus(smi(*hidden)), **others))
    assert [one.status for one in found] == statuses
    assert any(text in one.text for one in found)
    assert all(one.remedy for one in found if one.status == "problem")


def test_processors_of_arm_are_known_by_their_numbers():
    graviton = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert machine.processor_name(graviton) == "Neoverse V1"
    assert machine.processor_name("processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu") == "AMD EPYC"
    assert machine.processor_name("") == machine.platform.machine()


def test_memory_in_use_is_named():
    cards = parse_gpus(smi(H100.replace(" 0,", " 20480,")))
    (found,) = machine.accelerators(cards, cards)
    assert "20.0 used now" in found.text


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        ("sse4_2", "note", "no AVX2: compiled kernels need AVX2"),
        (AVX2, "ok", "; AVX2"),
        (f"{AVX2} avx512f avx512bw avx512dq avx512vl", "ok", "AVX-512 without avx512_bf16, avx512_vnni, which is not"),
        (AVX512, "ok", "AVX2, AVX-512"),
        (f"{AVX512} amx_tile amx_bf16 amx_int8", "ok", "AVX2, AVX-512, AMX (bf16, int8)"),
        ("fp asimd", "note", "NEON without dot products: compiled kernels need them"),
        ("fp asimd asimddp", "ok", "NEON with dot products; these kernels are tested under an emulator"),
        ("fp asimd asimddp i8mm", "ok", "i8mm, which is not used without bf16"),
        ("fp asimd asimddp i8mm bf16", "ok", "NEON with dot products, i8mm, bf16; these"),
    ],
)
def test_instruction_sets(flags, status, text):
    found = machine.processor("A processor", "0-3", flags.split())
    assert (found.status, text in found.text) == (status, True), found


@pytest.mark.parametrize(
    ("script", "gpu", "status", "text"),
    [
        (None, True, "ok", "not installed"),
        ("exit 1", False, "note", "daemon does not answer"),
        ("echo 28.1.0 runc nvidia", True, "ok", "28.1.0, with NVIDIA's runtime"),
        ("echo 28.1.0 runc", True, "note", "containers see no GPU"),
        ("echo 28.1.0 runc", False, "ok", "28.1.0"),
    ],
)
def test_docker(tmp_path, monkeypatch, script, gpu, status, text):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    if script:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker").chmod(0o755)
    found = machine.docker(gpu)
    assert (found.status, text in found.text) == (status, True), found


def test_a_folder_that_is_full_or_locked_is_named(tmp_path, monkeypatch):
    assert machine.disk(tmp_path / "not" / "there").status == "ok"
    monkeypatch.setattr(machine, "_LOW_DISK", 1 << 60)
    assert machine.disk(tmp_path).status == "note"
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert machine.disk(tmp_path).status == "problem"


def test_findings_are_readable_and_countable(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    long = "a text of many words that does not fit into one line of this terminal, so it is wrapped"
    found = [ok("machine", "CPU", "fast"), note("system", "port", long, "do this"), problem("system", "model", "gone")]
    text = as_text(found, "outrider serve")
    assert exit_code(found) == 1
    assert exit_code(found[:2]) == 0
    assert "\nmachine\n  ok       CPU           fast\n\nsystem\n  note     port          a text" in text
    assert text.endswith("\n\n1 problem, 1 note")
    assert " -> do this" in text
    assert max(map(len, text.splitlines())) <= 80
    assert '"problems": true' in as_json(found, "outrider serve")
    assert as_text(found[:1], "x").endswith("no problems")
