"""Logs: for people, or one JSON object an event."""

import contextlib
import json
import logging
import sys

import pytest

from outrider.supervisor.display import Display
from outrider.telemetry import LOG_NAME, REQUEST_ID, setup_logging, write_line
from services.draft.train.progress import Bar


@pytest.fixture(autouse=True)
def _as_before():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("given", "shown"), [("target-2", "target-2"), ("target", "target"), ("draft-1", "target")])
def test_a_replica_has_its_name_in_the_log(capsys, monkeypatch, given, shown):
    """A child of a child, such as a rank, may inherit a name of another role."""
    monkeypatch.setenv(LOG_NAME, given)
    setup_logging("target")
    logging.getLogger("a").info("ready")
    assert lines(capsys)[0].split()[1] == shown


def test_lines_for_people(capsys):
    setup_logging("draft")
    logging.getLogger("a").info("ready on %s", "here")
    (line,) = lines(capsys)
    assert line.split()[1:] == ["draft", "INFO", "ready", "on", "here"]


def test_json_has_what_belongs_to_an_event(capsys):
    setup_logging("target", "info", "json")
    log = logging.getLogger("services.target")
    log.debug("not shown")
    log.info("two\nlines of %s", "Zürich")
    token = REQUEST_ID.set("q7")
    log.warning("of a request", extra={"steps": 3, "path": None})
    REQUEST_ID.reset(token)
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("it failed")
    first, second, third = map(json.loads, lines(capsys))
    assert first.pop("time").endswith("+00:00")
    expected = {"level": "info", "role": "target", "logger": "services.target", "message": "two\nlines of Zürich"}
    assert first == expected
    assert (second["request_id"], second["steps"], second["path"], second["level"]) == ("q7", 3, None, "warning")
    assert "request_id" not in third
    assert third["exception"].endswith("ValueError: wrong")


def test_values_that_cannot_be_json_become_text(capsys):
    setup_logging("gateway", "info", "json")
    logging.getLogger("x").info("odd", extra={"what": sys})
    (line,) = lines(capsys)
    assert json.loads(line)["what"] == str(sys)


def test_lines_that_cannot_be_written_end_neither_a_system_nor_a_training(monkeypatch):
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - its end fails, too
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        write_line("a child's line")
        display = Display()
        display.line("preparing")
        display.starting({"target": None, "draft": "loading"})
        display.ready([("REST", "http://h:5/v1")], "curl http://h:5")
        with Bar("tokens", 10) as bar:
            bar.at(10)
    with contextlib.suppress(OSError):
        full.close()
