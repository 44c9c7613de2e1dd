"""`outrider ray` where Ray is missing, or no cluster runs."""

import sys

import pytest

from outrider import cli
from outrider.clusters.ray import commands
from outrider.errors import ConfigError


@pytest.mark.parametrize("verb", ["up", "status", "down"])
def test_without_ray_the_extra_is_named(monkeypatch, capsys, verb):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["ray", verb]) == 2
    shown = capsys.readouterr()
    assert 'outrider ray needs ray, which is not installed; run `pip install "outrider[ray]"`' in shown.err
    assert shown.out == ""


def test_verbs(capsys):
    assert commands.main(["--help"]) == 0
    assert "usage: outrider ray VERB" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="choose one of up, status, down"):
        commands.main(["restart"])


class NoCluster:
    """Ray on a machine of no cluster."""

    def init(self, **_):
        raise ConnectionError("Could not find any running Ray instance.\nFurther lines.")


def test_without_a_cluster_an_error_says_how_to_start_one(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", NoCluster())
    monkeypatch.setitem(sys.modules, "outrider.clusters.ray.platform", type("Platform", (), {"NAMESPACE": "x"})())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert cli.main(["ray", "status"]) == 2
    assert "no Ray cluster can be reached at 10.0.0.9:6379: Could not find any running Ray instance.; start one" in (
        capsys.readouterr().err
    )
