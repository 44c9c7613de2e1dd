"""The command line of the benchmarks: dispatch, signals, and checks of flags before anything is measured."""

import signal
import types

import pytest

from bench.__main__ import BENCHMARKS, main
from outrider.errors import ConfigError


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_child_processes_end_with_a_benchmark_on_signals(number, code, monkeypatch):
    ended = []

    def run(_):
        try:
            signal.raise_signal(number)
        finally:
            ended.append(True)

    monkeypatch.setattr("bench.__main__.importlib.import_module", lambda _: types.SimpleNamespace(main=run))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(code)):
            main(["target"])
        assert ended
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert main(["target"]) == 0, "nohup ignores SIGHUP"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_help_text(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["accept", "online", "peers", "quality", "self-speculation", "serve"])
def test_an_invalid_prompt_file_is_a_usage_error(name, tmp_path, capsys):
    before = ["--draft", "x"] if name == "online" else []
    flag = [] if name in ("accept", "online") else ["--prompts"]
    (tmp_path / "wrong").write_text('{"question": 1}')
    (tmp_path / "empty").write_text("")
    for file, words in (("nowhere", "nowhere"), ("wrong", 'row 1 has neither "turns"'), ("empty", "empty")):
        with pytest.raises(SystemExit, match="2"):
            main([name, *before, *flag, str(tmp_path / file)])
        assert words in capsys.readouterr().err


def test_all_continues_after_a_benchmark_fails(monkeypatch, capsys):
    run = []

    def module(path):
        def main(_):
            run.append(path)
            if path == "bench.services.target_kernels":
                raise ConfigError("a C++ compiler is needed")

        return types.SimpleNamespace(main=main)

    monkeypatch.setattr("bench.__main__.importlib.import_module", module)
    assert main(["all"]) == 1
    assert run.index("bench.services.target_kernels") < run.index("bench.services.deterministic")
    assert capsys.readouterr().err == "outrider bench kernels: error: a C++ compiler is needed\n"
    with pytest.raises(ConfigError):
        main(["kernels"])


@pytest.mark.parametrize("wrong", [
    "trees --trees 2/4", "trees --trees 2/4/x", "trees --trees 2/4/6 2/3/6", "draft --kinds cpu",
    "draft --kinds foo/bfloat16", "draft --shapes 4", "gpu --parts foo", "kernels --threads 0",
    "target --formats float3", "deterministic --models mow",
])  # fmt: skip
def test_unknown_values_of_flags_are_usage_errors(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong.split())
    assert f"argument {wrong.split()[1]}: " in capsys.readouterr().err


def test_earlier_names_are_aliases(capsys):
    with pytest.raises(SystemExit):
        main(["self-draft", "--help"])
    assert "outrider bench self-speculation" in capsys.readouterr().out


def test_counts_of_zero_are_usage_errors(capsys):
    wrong = ("accept x --limit 0", "online x --draft y --rounds 0", "peers --rounds 0", "scale --new-tokens 0")
    wrong += ("speculation x --turns 0", "system --concurrency 0", "self-draft --limit 0", "quality --count 0")
    for words in wrong:
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert "0 is less than 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--outrider", "--transformers"])
    assert "there are no peers" in capsys.readouterr().err
