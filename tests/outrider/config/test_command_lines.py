"""Command lines of SGLang, SGL-JAX and slime, through the real parser and the dry run."""

import json
import logging
import os
import socket
import subprocess
import sys

import pytest

from outrider import cli
from outrider.config import (
    DraftConfig,
    GatewayConfig,
    ServeConfig,
    TargetConfig,
    TrainConfig,
    check_device,
    parse_flags,
    read_flags,
)
from outrider.config.compatibility.environment import environment_notes
from outrider.config.compatibility.foreign_flags import FOREIGN_FLAGS, FOREIGN_KERNELS
from outrider.config.compatibility.on_cpu import for_cpu
from outrider.errors import ConfigError
from outrider.placement import devices
from outrider.supervisor import dry_run
from outrider.supervisor.resolution import resolve_config
from tests.support.outrider.command_lines import COMMAND_LINES, GRAPH_SIZES, plan, prefixed, values, warned, words
from tests.support.tiny import write_model

SPEC_V2, GREEDY = "SGLANG_ENABLE_SPEC_V2", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Four cores and no GPU; no host can be reached."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(devices, "_GPU", tmp_path / "none")
    for name in (SPEC_V2, GREEDY):
        monkeypatch.delenv(name, raising=False)

    def connect(*_):
        raise AssertionError("a dry run opens no connection")

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def with_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_GPU", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_line_is_accepted(name, gpu, request):
    if gpu:
        request.getfixturevalue("with_gpu")
    line = words(name)
    made = plan(*line)
    assert {"target", "gateway"} < made.processes.keys()
    assert plan(*prefixed(line)).processes == made.processes  # slime's prefix on every flag
    assert plan(*[word.replace("-", "_").replace("__", "--", 1) if word.startswith("--") and "=" not in word else word
                  for word in line]).processes == made.processes  # fmt: skip
    assert len(set(made.warnings)) == len(made.warnings)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_no_flag_of_a_line_is_ignored_in_silence(name, with_gpu):
    """Each flag has its value in a process, or a warning names it."""
    made = plan(*words(name))
    resolved = {(setting.flag, setting.words) for process in made.processes.values() for setting in process.settings}
    renamed = {"--mem-fraction": "--mem-fraction-static", "--model": "--model-path",
               "--rollout-num-gpus-per-engine": "--tp-size"}  # fmt: skip
    flag = ""
    given = {}
    for word in words(name):
        if word.startswith("--"):
            flag, equals, value = word.replace("--sglang-", "--").partition("=")
            given[flag] = [value] if equals else []
        else:
            given[flag].append(word)
    for flag, value in given.items():
        text = " ".join(value) or "on"
        assert (renamed.get(flag, flag), text) in resolved or any(flag in warning for warning in made.warnings), flag


def test_values_arrive(with_gpu):
    target, draft = (values(plan(*words("1")).processes[name]) for name in ("target", "draft"))
    assert target["--speculative-num-draft-tokens"] == 16
    assert (target["--mem-fraction-static"], target["--cuda-graph-max-bs"]) == (0.7, 8)
    assert draft["--speculative-draft-model-path"] == "lmsys/sglang-EAGLE-llama2-chat-7B"
    assert values(plan(*words("3")).processes["target"])["--mem-fraction-static"] == 0.6
    made = plan(*words("12, paddings"))
    target, draft = values(made.processes["target"]), values(made.processes["draft"])
    assert (target["--tp-size"], target["--page-size"], target["--decode-log-interval"]) == (4, 64, 1)
    assert draft["--speculative-draft-model-revision"] == "67caf31f9062d7ab64872e0a111d499bc16cd205"
    assert draft["--precompile-bs-paddings"] == (1, 8, 16)
    made = plan(*words("14, graphs"))
    target = values(made.processes["target"])
    assert target["--cuda-graph-bs"] == GRAPH_SIZES
    assert (target["--disable-cuda-graph-padding"], target["--attention-backend"]) == (True, "auto")
    assert values(plan("--rollout-num-gpus-per-engine", "2").processes["target"])["--tp-size"] == 2


def test_a_note_appears_once_and_also_with_log_level_warning(caplog):
    line = ["--speculative-attention-mode", "decode", "--attention-backend", "fa3", "--log-level", "warning"]
    made = plan(*line, *line)
    assert warned(made, "--speculative-attention-mode decode has no effect: one attention kernel") == 1
    assert warned(made, "--attention-backend fa3 names kernels that this service does not have") == 1
    command = [sys.executable, "-m", "outrider", "draft", *line[:2], *line[4:], "--speculative-algorithm", "NONE"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2  # NONE needs no draft service
    assert result.stderr.count("--speculative-attention-mode decode has no effect") == 1
    assert "WARNING" in result.stderr


@pytest.mark.parametrize("flag", FOREIGN_FLAGS, ids=lambda flag: flag.name)
def test_foreign_flags_take_their_words_and_say_why_they_have_no_effect(flag):
    taken = {0: [], 1: [(flag.choices or ("x",))[0]], None: ["1", "2"]}[flag.words]
    config, notes = read_flags(ServeConfig, [flag.name, *taken, "--port", "5"], "outrider serve")
    assert config.gateway.port == 5
    (note,) = notes
    assert note == f"{' '.join([flag.name, *taken])} has no effect: {flag.reason}"
    if flag.words != 0:
        refused(flag.name, "--port", "5", match="needs a value")
    if flag.choices:
        refused(flag.name, "nonsense", match="choose one of")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", FOREIGN_KERNELS)
@pytest.mark.parametrize("flag", ["--attention-backend", "--speculative-draft-attention-backend"])
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_names_of_other_kernels_select_ours(flag, kernels, form):
    config, notes = read_flags(ServeConfig, form.format(flag, kernels).split(), "outrider serve")
    assert (config.target.attention_backend, config.draft.draft_attention_backend) == ("auto", "auto")
    assert len(notes) == 1
    assert f"{flag} {kernels}" in notes[0]


def refused(*line, match):
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.config.flags.write_line", written.append)
        with pytest.raises(SystemExit) as end:
            read_flags(ServeConfig, list(line), "outrider serve")
    assert end.value.code == 2
    assert match in written[0]


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--speculative-num-step", "--speculative-num-steps"),
        ("--sglang-speculative-eagle-top-k", "--speculative-eagle-topk"),
        ("--speculative-moe-a2a", "--speculative-moe-a2a-backend"),
        ("--mem-fraction-statics=0.5", "--mem-fraction-static"),
        ("--no-enable-log-request", "--no-enable-log-requests"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_one(given, nearest):
    refused(given, match=f"there is no flag {given.partition('=')[0]}; the nearest one is {nearest};")


@pytest.mark.parametrize("config", [TargetConfig, DraftConfig, GatewayConfig, TrainConfig])
def test_flags_of_another_process_are_unknown(config, capsys):
    with pytest.raises(SystemExit):
        parse_flags(config, ["--cores-target", "1"], "outrider x")
    assert "there is no flag --cores-target; the nearest one is " in capsys.readouterr().err


# --- variables of SGLang ---


def test_overlap_needs_a_chain_as_in_sglang(monkeypatch):
    monkeypatch.setenv(SPEC_V2, "True")
    made = plan(*words("9"))
    assert warned(made, f"{SPEC_V2} has no effect: steps overlap") == 1
    with pytest.raises(ConfigError, match=f"{SPEC_V2} needs --speculative-eagle-topk 1, as in SGLang, not 2"):
        plan(*words("8"))
    monkeypatch.setenv(SPEC_V2, "false")
    assert warned(plan(*words("8")), SPEC_V2) == 0


def test_greedy_verification_is_not_forced(monkeypatch):
    monkeypatch.setenv(GREEDY, "True")
    assert warned(plan(*words("10")), f"{GREEDY} has no effect: verification never changes a text") == 1


def test_other_variables_are_named_in_one_line():
    notes = environment_notes({"SGLANG_X": "1", "SGL_JAX_Y": "0", "HOME": "/"}, "NGRAM", None)
    assert notes == ["variables of SGLang that are not read: SGLANG_X, SGL_JAX_Y"]


# --- what is replaced ---


def test_a_tree_is_lowered_to_what_it_has():
    made = plan(*words("11"))
    assert warned(made, "--speculative-num-draft-tokens 8 becomes 7") == 1
    for name in ("target", "draft"):
        assert values(made.processes[name])["--speculative-num-draft-tokens"] == 7


def test_a_tpu_is_for_the_draft_service(with_gpu):
    made = plan(*words("12"))
    assert (
        warned(made, "--device tpu: the target service (PyTorch) does not run on TPUs and uses this machine's GPU") == 1
    )
    assert "TPU" in made.processes["draft"].device
    assert made.processes["target"].device.startswith("cuda")
    with pytest.raises(ConfigError, match="outrider draft --draft-device tpu"):
        check_device("tpu:0")
    check_device("cuda:1")


def test_on_a_cpu_flags_of_a_gpu_are_replaced_or_without_effect(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    line = "--cuda-graph-bs 1 2 --disable-cuda-graph-padding --disable-overlap-schedule --quantization fp8"
    line += " --attention-backend triton --page-size 8"
    options, _ = read_flags(TargetConfig, line.split(), "outrider target")
    made, notes = for_cpu(options)
    assert made == TargetConfig(page_size=8, quantization="int8")
    assert len(notes) == 4
    assert "--cuda-graph-bs, --disable-cuda-graph-padding are without effect" in notes[0]
    assert for_cpu(TargetConfig()) == (TargetConfig(), [])
    made = plan(*words("4"))
    assert warned(made, "--dtype float16: a CPU has no kernels for it; the target computes in bfloat16") == 1
    assert warned(made, "--cuda-graph-max-bs is without effect on a CPU") == 1


def test_on_a_gpu_nothing_is_replaced(with_gpu):
    assert plan(*words("4")).warnings == []


@pytest.mark.parametrize("algorithm", ["EAGLE", "nextn"])
def test_the_default_model_has_a_head_in_place_of_mtp_layers(algorithm):
    made = plan("--speculative-algorithm", algorithm)
    assert values(made.processes["draft"])["--speculative-algorithm"] == "EAGLE3"
    assert warned(made, "the default model has no MTP layers; its bundled EAGLE-3 head drafts") == 1
    made = plan("--model", "some/model", "--speculative-algorithm", algorithm)
    assert values(made.processes["draft"])["--speculative-algorithm"] == algorithm.upper()


def test_flags_that_the_drafter_does_not_use_are_named():
    made = plan("--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "a/b", "--draft-dtype", "float32")
    assert warned(made, "--speculative-draft-model-path has no effect with NGRAM") == 1
    assert warned(made, "--draft-dtype has no effect with NGRAM") == 1
    assert values(made.processes["draft"])["--speculative-draft-model-path"] is None


def test_a_folder_has_no_revision(tmp_path):
    head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-revision", "x"]
    made = plan("--model", "a/b", *head, "--speculative-draft-model-path", str(tmp_path))
    assert warned(made, "--speculative-draft-model-revision has no effect") == 1
    assert warned(plan("--model", "a/b", *head, "--speculative-draft-model-path", "c/d"), "revision") == 0


# --- the dry run ---


def test_the_plan_shows_where_values_come_from():
    target = plan(*words("1")).processes["target"]
    sources = {setting.flag: setting.source for setting in target.settings}
    assert sources["--mem-fraction-static"] == "set"
    assert sources["--self-speculation"] == "derived"
    assert sources["--page-size"] == "default"
    order = [setting.source for setting in target.settings]
    assert order == sorted(order, key=["set", "derived", "default"].index)


@pytest.mark.parametrize("form", [["--dry-run"], ["--dry-run", "text"], ["--dry-run=text"]])
def test_a_dry_run_is_readable(form, capsys):
    assert cli.main(["serve", *form, *words("1")]) == 0
    text = capsys.readouterr().out
    for part in ("\ntarget\n", "\ndraft\n", "\ngateway\n", "\nmemory\n", "\nwarnings\n", "  cores    0,1\n"):
        assert part in text
    assert "  set      --log-level warning\n" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_dry_run_as_json(capsys):
    assert cli.main(["serve", *words("1"), "--dry-run=json", "--api-key", "s3cret", "--admin-api-key", "s3cret"]) == 0
    text = capsys.readouterr().out
    assert "s3cret" not in text
    whole = json.loads(text)
    assert list(whole["processes"]) == ["target", "draft", "gateway"]
    flags = whole["processes"]["draft"]["flags"]
    assert flags["speculative-algorithm"] == {"value": "EAGLE", "source": "set"}
    again = parse_flags(DraftConfig, whole["processes"]["draft"]["argv"], "outrider draft")
    assert again.speculative_num_draft_tokens == 16


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--speculative-algorithm STANDALONE", "needs a draft model"),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b --model c/d --speculative-num-steps 3",
         "set all three"),
        ("--speculative-algorithm NGRAM --speculative-ngram-max-match-window-size 0", "the NGRAM windows"),
        ("--port 5 --grpc-port 5", "both 5"),
        ("--cores 99", "core 99 cannot be used"),
    ],
)  # fmt: skip
def test_a_dry_run_ends_with_the_reason(line, reason, capsys):
    assert cli.main(["serve", "--dry-run", *line.split()]) == 2
    assert reason in capsys.readouterr().err


def test_warnings_of_an_earlier_call_are_not_logged_again(caplog):
    config, _ = read_flags(ServeConfig, words("12"), "outrider serve")
    logged = set()
    assert resolve_config(config, logged) == resolve_config(config, logged)
    assert caplog.text.count("--device tpu") == 1


def test_the_memory_plan_of_a_checkpoint_on_this_machine(tmp_path):
    folder = write_model(tmp_path / "model")
    made = plan("--model", str(folder), "--max-total-tokens", "320")
    assert "20 pages of 16 tokens = 320 tokens" in made.memory["target"]
    assert "measured at the start" in plan("--model", "not/here").memory["target"]
    with pytest.raises(ConfigError, match="no room for a page"):
        plan("--model", str(folder), "--max-total-tokens", "8")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("page-size", "0"), ("decode-log-interval", "0"), ("chunked-prefill-size", "-2"), ("mem-fraction-static", "1.5"),
     ("speculative-accept-threshold-single", "1.5"), ("max-prefill-tokens", "0")],
)  # fmt: skip
def test_numbers_out_of_range_of_the_target_are_refused_before_the_start(flag, value):
    with pytest.raises(ConfigError, match=f"--{flag} must"):
        plan(f"--{flag}", value)


@pytest.mark.parametrize(("flags", "reason"), [
    (["--tp-size", "2", "--deterministic"], "--deterministic does not go with --tp-size 2"),
    (["--tp-size", "2", "--self-speculation", "lookup"], "--self-speculation lookup and --tp-size 2"),
    (["--tp-size", "2", "--device", "cuda:1,cuda:2,cuda:3"], "names 3 devices for 2 ranks"),
    (["--tp-size", "4"], "--tp-size 4 does not divide the model's 2 key-value heads; choose a divisor of 2"),
    (["--tp-size", "2", "--nnodes", "2"], "--nnodes 2 needs --dist-init-addr HOST:PORT"),
    (["--tp-size", "2", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "a:1"], "start `outrider target`"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_refused_before_the_start(flags, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        plan("--model", str(write_model(tmp_path / "model")), *flags)


def test_ranks_on_two_machines_are_planned():
    made = plan("--tp-size", "16", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:29500", "--model", "not/here")
    assert made.processes["target"].device == "CPU, found by --device auto; 16 tensor-parallel processes on 2 machines"
    assert "--nnodes" in made.processes["target"].argv


def test_a_port_in_use_and_a_missing_folder_are_warnings(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        made = plan("--port", str(taken.getsockname()[1]), "--model", str(tmp_path / "none"))
    assert warned(made, "in use") == 1
    assert warned(made, f"--model-path {tmp_path}/none is not on this machine") == 1


def test_a_dry_run_leaves_the_log_as_it_was(caplog):
    logger = logging.getLogger("outrider")
    before = logger.level, logger.propagate, list(logger.handlers)
    dry_run.dry_run(read_flags(ServeConfig, words("12"), "outrider serve")[0])
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert not caplog.records


@pytest.mark.parametrize("name", ["1", "12, paddings", "14, graphs"])
def test_lines_through_the_command_itself(name):
    command = [sys.executable, "-m", "outrider", "serve", "--dry-run", *words(name)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "gateway" in result.stdout


def test_overlap_through_the_command_itself():
    environment = {**os.environ, SPEC_V2: "True"}
    command = [sys.executable, "-m", "outrider", "serve", "--dry-run", *words("8")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 2
    assert result.stderr.startswith("outrider: error: SGLANG_ENABLE_SPEC_V2 needs --speculative-eagle-topk 1")
