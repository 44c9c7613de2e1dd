"""The two help pages of each process."""

import re
from dataclasses import fields

import pytest

from outrider.config import (
    DraftConfig,
    GatewayConfig,
    ServeConfig,
    TargetConfig,
    TrainConfig,
    flag_classes,
    parse_flags,
)
from outrider.config.flags import TOPICS

CONFIGS = [ServeConfig, TargetConfig, DraftConfig, GatewayConfig, TrainConfig]


def shown(config, *argv, capsys):
    """The flags on a help page, by the title of their group."""
    with pytest.raises(SystemExit) as end:
        parse_flags(config, argv, "outrider x")
    assert end.value.code == 0
    groups, title = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if found := re.match(r"\W{1,3}(?:(\w[\w -]*) )?options\W*$", line):  # boxes are drawn in Unicode or in ASCII
            title = found[1] or ""
        elif re.match(r"\W{1,2}--?\w", line):
            groups.setdefault(title, set()).update(re.findall(r"--[\w-]+", line))
    return groups


def names(*configs):
    return {"--" + field.name.replace("_", "-") for cls in configs for field in fields(cls)}


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_ten_flags_and_names_help_all(config, flag, capsys):
    (flags,) = shown(config, flag, capsys=capsys).values()
    every = names(*flag_classes(config))
    assert len(config.common) == 10
    assert flags & every == {"--" + name.replace("_", "-") for name in config.common}
    assert {"--help", "--help-all"} < flags


@pytest.mark.parametrize("config", CONFIGS)
def test_help_all_shows_every_flag_by_topic(config, capsys):
    groups = shown(config, "--port", "5", "--help-all", capsys=capsys)
    assert groups.pop("") == {"--help"}
    assert list(groups) == [topic for topic in TOPICS if topic in groups]
    for topic, flags in groups.items():
        declared = names(*(cls for cls in flag_classes(config) if cls.topic == topic))
        assert declared <= flags
    assert names(*flag_classes(config)) <= set().union(*groups.values())


@pytest.mark.parametrize("config", CONFIGS)
def test_every_flag_has_a_topic(config):
    """A field outside a class with a topic would be on no help page."""
    nested = {name for field in fields(ServeConfig) if callable(name := field.default_factory)}
    whole = names(config, *nested) if config is ServeConfig else names(config)
    assert whole - {"--shared", "--target", "--draft", "--gateway"} <= names(*flag_classes(config))


def test_the_first_flag_is_the_model(capsys):
    with pytest.raises(SystemExit):
        parse_flags(ServeConfig, ["--help"], "outrider serve")
    page = capsys.readouterr().out
    places = [page.index(f"--{name.replace('_', '-')} ") for name in ServeConfig.common]
    assert places == sorted(places)
