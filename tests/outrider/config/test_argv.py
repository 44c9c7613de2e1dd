"""Spellings of arguments that the parser does not know."""

import pytest

from outrider.config import ServeConfig, TargetConfig, parse_flags, to_argv
from outrider.config.compatibility.spellings import translate


@pytest.mark.parametrize(("given", "current"), [("eagle3", "EAGLE3"), ("", "NONE"), ("Standalone", "STANDALONE")])
def test_algorithm_names_may_be_in_lower_case_or_empty(given, current):
    flag = "--speculative-algorithm"
    assert translate(["--port", "eagle", flag, given]).argv == ["--port", "eagle", f"{flag}={current}"]
    assert translate([f"{flag}={given}"]).argv == [f"{flag}={current}"]
    assert translate([flag]).argv == [flag]  # which the parser refuses


@pytest.mark.parametrize(
    ("value", "source", "number_format"),
    [
        ("auto", "auto", "auto"),
        ("off", "off", "auto"),
        ("text", "lookup", "auto"),
        ("head", "head", "auto"),
        ("int4", "quantized", "int4"),
        ("int8", "quantized", "int8"),
    ],
)
@pytest.mark.parametrize("spelling", ["--self-draft {}", "--self-draft={}", "--self_draft {}"])
def test_self_draft_is_a_source_and_a_format(value, source, number_format, spelling):
    argv = ["--self-draft", "int8", *spelling.format(value).split(), "--port", "5"]  # of two, the last one counts
    target = parse_flags(ServeConfig, argv, "serve").target
    assert (target.self_speculation, target.self_speculation_format) == (source, number_format)


def test_the_new_flags_of_self_speculation_are_the_same_configuration():
    old = parse_flags(TargetConfig, ["--self-draft", "int4", "--self-draft-head", "folder"], "target")
    new = ["--self-speculation", "quantized", "--self-speculation-format", "int4", "--self-speculation-head", "folder"]
    assert old == parse_flags(TargetConfig, new, "target")
    assert to_argv(old) == new
    assert parse_flags(TargetConfig, [], "target") == TargetConfig()


@pytest.mark.parametrize("argv", [["--self-draft"], ["--self-draft", "int2"], ["--self-draft="]])
def test_a_wrong_value_of_self_draft_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as end:
        parse_flags(TargetConfig, argv, "target")
    assert end.value.code == 2
    assert "--self-speculation" in capsys.readouterr().err
