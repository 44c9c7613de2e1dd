"""The doctor's report about a command line, on machines that are not here."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import cli
from outrider.config import DoctorConfig, read_flags
from outrider.doctor import probes, report, software, table
from outrider.doctor.findings import exit_code
from outrider.placement import devices
from tests.support.checkpoints.headers import write_qwen
from tests.support.gpu_machine import H100, put_gpus, take_gpus

KERNELS = {f"kernels of {part}": {"path": "/lib/x.so"} for part in probes.KERNELS}
CPU = KERNELS | {
    "torch": {"version": "2.13.0+cpu", "cuda": None, "available": False},
    "jax": {"version": "0.10.2", "platform": "cpu", "devices": ["cpu"]},
}
GPU = KERNELS | {
    "torch": {"version": "2.13.0", "cuda": "13.0", "available": True, "devices": ["H100"], "warnings": []},
    "jax": {"version": "0.10.2", "platform": "gpu", "devices": ["H100"]},
}


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Answers of the child processes, by name; a CPU's at first, on a machine without GPUs."""
    given = dict(CPU)
    take_gpus(monkeypatch, tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probes, "ask_all", lambda code: {name: given[name] for name in code})
    absent, find = ("torchao", "jax-cuda12-plugin", "jax-cuda13-plugin"), software.version_of
    monkeypatch.setattr(software, "version_of", lambda name: None if name in absent else find(name))
    return given


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_qwen(tmp_path_factory.mktemp("models") / "model", 1024, 3072, 28, 16))


@pytest.fixture
def gpus(monkeypatch, tmp_path, answers):
    """Puts GPUs into the machine, with libraries that use them."""

    def put(*cards, **others):
        put_gpus(monkeypatch, tmp_path, *cards, **others)
        answers.update(GPU)

    return put


def examine(*flags):
    """The findings by topic and name, and the exit code."""
    config, notes = read_flags(DoctorConfig, flags, "outrider doctor")
    found = list(report.findings(config, notes))
    return {f"{one.topic} {one.name}": one for one in found}, exit_code(found)


def test_a_cpu_machine(answers, model):
    core = str(min(os.sched_getaffinity(0)))
    found, _ = examine("--model-path", model, "--cores", core)
    assert found["system target"].text.endswith("because there is no NVIDIA GPU (--device auto)")
    assert found["system draft"].text.endswith("because NGRAM looks tokens up and has no model")
    assert found["system drafter"].text == "NGRAM, because the draft service shares the target's cores (AUTO)"
    assert model in found["system model"].text
    assert found["machine GPUs"].status == "ok"


def test_one_gpu_is_shared_by_plan(gpus, model):
    gpus(H100)
    draft = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model)
    found, _ = examine("--model-path", model, *draft)
    assert found["system target"].text.startswith("cuda:0 (NVIDIA H100 80GB HBM3), because --device auto")
    assert found["system draft"].text.startswith("cuda:0, beside the target: ")
    assert found["system draft"].text.split()[4] == found["memory draft"].text.split()[0]  # GiB
    assert "draft headroom" in found["memory target"].text


def test_two_gpus_have_a_service_each(gpus, model):
    gpus(H100, H100)
    draft = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model)
    found, _ = examine("--model-path", model, *draft)
    assert found["system draft"].text == "cuda:1, which the target does not use"
    found, _ = examine("--model-path", model, *draft, "--device", "cuda:1")
    assert found["system draft"].text == "cuda:0, which the target does not use"
    found, _ = examine("--model-path", model, *draft, "--tp-size", "2")
    assert found["system draft"].text.startswith("cuda:0, beside the target")
    found, _ = examine("--model-path", model, *draft, "--draft-device", "cuda:0")
    assert found["system draft"].text.startswith("cuda:0, beside the target")


def test_every_replica_has_a_line(gpus, model):
    gpus(H100, H100, H100)
    draft = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model)
    found, _ = examine("--model-path", model, *draft, "--target-replicas", "2", "--draft-replicas", "2")
    assert found["system target-2"].text.startswith("cuda:1 (NVIDIA H100 80GB HBM3), because --device auto")
    assert found["system draft-1"].text == found["system draft-2"].text == "cuda:2, which no target uses"
    assert {"memory target-1", "memory target-2", "memory draft-1", "memory draft-2"} < found.keys()
    found, code = examine("--model-path", model, *draft, "--target-replicas", "4")
    assert (found["system flags"].status, code) == ("problem", 1)
    assert "needs 4 devices, and this machine has 3" in found["system flags"].text


@pytest.mark.parametrize(
    ("cards", "flags", "name", "status", "text"),
    [
        ([H100], ["--device", "cuda:3"], "system target", "problem", "there is no GPU 3; this machine has 1"),
        ([H100], ["--device", "cpu"], "system target", "ok", "because --device cpu"),
        ([H100], ["--cores", "99"], "system flags", "problem", "core 99 cannot be used"),
        ([H100], ["--speculative-algorithm", "NONE"], "system drafter", "ok", "decodes plainly"),
        ([H100], ["--quantization", "fp8"], "software torchao", "problem", "not installed"),
        ([H100.replace(" 0,", " 40960,")], [], "memory in use", "note", "use 40.0 GiB of the target's GPU"),
        (
            [H100],
            ["--mem-fraction-static", "0.99"],
            "memory too much",
            "problem",
            "--mem-fraction-static 0.99: weights, cache",
        ),
        ([], ["--quantization", "fp8"], "flags warning", "note", "weights are int8"),
        ([], ["--model-path", "/nowhere/model"], "system model", "problem", "is not on this machine"),
        (
            [],
            ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/nowhere/draft"],
            "system draft model",
            "problem",
            "--speculative-draft-model-path /nowhere/draft is not on this machine",
        ),
        (
            [],
            ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "a/b", "--draft-device", "tpu"],
            "system draft",
            "problem",
            "JAX finds no TPU",
        ),
        ([], ["--model-path", "some/model"], "system model", "note", "the first start downloads it"),
    ],
)
def test_findings_about_a_command_line(gpus, answers, model, cards, flags, name, status, text):
    if cards:
        gpus(*cards)
    model_flag = () if "--model-path" in flags else ("--model-path", model)
    found, code = examine(*model_flag, *flags)
    assert (found[name].status, text in found[name].text) == (status, True), found[name]
    assert code == 1 or status != "problem"


def test_libraries_that_cannot_use_the_gpu(gpus, answers, model):
    gpus(H100, plugin=False)
    answers.update(CPU)
    found, code = examine("--model-path", model, "--device", "cuda")
    assert [found[name].status for name in ("software PyTorch", "system target")] == ["problem", "problem"]
    assert found["software JAX"].status == "note"
    assert code == 1
    found, _ = examine("--model-path", model)
    assert found["system target"].text.startswith("CPU, cores")


def test_a_gpu_whose_memory_is_not_known(gpus, model):
    gpus()
    found, _ = examine("--model-path", model)
    assert (found["machine GPUs"].status, found["system target"].status) == ("note", "ok")
    assert found["system target"].text.startswith("cuda:0 (its memory is not known)")
    assert "measured at the start" in found["memory target"].text


def test_a_port_in_use_is_a_problem(answers, model):
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("127.0.0.1", 0))
            one.listen()
        ports = [one.getsockname()[1] for one in (taken, other)]
        found, code = examine("--model-path", model, "--port", str(ports[0]))
        assert (found["system port"].status, "choose another with --port" in found["system port"].text) == (
            "problem",
            True,
        )
        found, _ = examine("--model-path", model, "--listen-draft", f"127.0.0.1:{ports[1]}")
        assert "choose another with --listen-draft" in found["system port"].text
    assert code == 1


def test_a_missing_package_is_a_finding(monkeypatch, answers, model):
    find = report.importlib.util.find_spec
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None if name == "jax" else find(name))
    monkeypatch.setattr(software, "version_of", lambda name: None if name in ("jax", "jaxlib") else "2.0")
    found, code = examine("--model-path", model)
    assert (found["software draft"].text, code) == ("not installed: jax, jaxlib", 1)
    assert found["system draft"].status == "ok"
    assert "software JAX" not in found


def test_output_for_people_and_programs(answers, model, capsys):
    flags = ["--model-path", model, "--api-key", "s3cret", "--admin-api-key=s3cret"]
    code = cli.main(["doctor", *flags])
    text = capsys.readouterr().out
    assert f"What `outrider serve --model-path {model} --api-key HIDDEN --admin-api-key=HIDDEN` would run" in text
    for topic in ("machine", "software", "system", "memory"):
        assert f"\n{topic}\n" in text
    assert max(map(len, text.splitlines()[1:])) <= 120
    assert cli.main(["doctor", "--json", *flags]) == code
    output = capsys.readouterr().out
    whole = json.loads(output)
    assert whole["problems"] == (code == 1)
    assert {"topic", "name", "status", "text", "remedy"} == whole["findings"][0].keys()
    assert "s3cret" not in text + output
    assert cli.main(["doctor", "--dry-run"]) == 2
    assert "leave --dry-run out" in capsys.readouterr().err


def test_this_process_imports_neither_library(tmp_path):
    code = (
        "import sys; from outrider.doctor import probes, report; probes.ask_all = lambda code: dict.fromkeys(code, "
        "{'error': 'left out'}); from outrider.config import DoctorConfig; list(report.findings(DoctorConfig())); "
        "sys.exit(bool({'jax', 'torch'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


# --- what fits a GPU ---


def test_the_table_follows_from_the_plan():
    rows = list(table.rows(table.LLAMA_8B, table.LLAMA_1B))
    assert [(row.weights, row.draft) for row in rows[:3]] == [
        ("bfloat16", "none"), ("bfloat16", "EAGLE-3 head"), ("bfloat16", "Llama-3.2-1B"),
    ]  # fmt: skip
    plain, head, small = (row.plans for row in rows[:3])
    assert 14.9 < plain[-1].weights / 2**30 < 15.0
    assert plain[-1].token_bytes == 131_072
    for less, more in ((head, plain), (small, head)):
        assert all(a is None or a.tokens < b.tokens for a, b in zip(less, more, strict=True))
    for row in rows:
        known = [plan.tokens for plan in row.plans if plan is not None]
        assert known == sorted(known)
        for plan, beside in zip(row.plans, row.drafts, strict=True):
            assert plan is None or plan.weights + plan.working + beside + plan.kv_bytes <= 0.98 * plan.total
    large = list(table.rows(table.LLAMA_70B, table.LLAMA_1B))
    assert [plan is not None for plan in large[0].plans] == [False, False, False, False, True]
    assert [plan is not None for plan in large[3].plans] == [False, False, False, True, True]  # fp8
    halves = list(table.rows(table.LLAMA_70B, table.LLAMA_1B, tp_size=2))
    assert halves[0].plans[-2] is not None


def test_shapes_have_the_sizes_of_the_published_models():
    billions = {shape.name: shape.weights() / 2e9 for shape in (
        table.LLAMA_1B, table.LLAMA_8B, table.LLAMA_70B, table.QWEN_2B, table.QWEN_32B)}  # fmt: skip
    assert {name: round(count, 2) for name, count in billions.items()} == {
        "Llama-3.2-1B": 1.24, "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.55, "Qwen3-1.7B": 1.72, "Qwen3-32B": 32.76,
    }  # fmt: skip


def test_the_table_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_smi", lambda: pytest.fail("the driver was asked"))
    assert cli.main(["doctor", "--memory-table"]) == 0
    assert capsys.readouterr().out == table.page()
