"""The draft service around its learner."""

from dataclasses import replace

from outrider.config import ServeConfig
from outrider.placement.cores import CorePlan
from outrider.supervisor.app import configure
from services.draft.online.background import Background


def test_failed_learner_does_not_stop_the_service(caplog):
    def turn():
        raise RuntimeError("no memory")

    background = Background(turn, 0.5)
    background.start()
    background.stop()
    assert "training has ended" in caplog.text


def test_serve_passes_the_flags_on(tmp_path):
    config = ServeConfig()
    config = replace(config, draft=replace(config.draft, online=True, online_share=0.1, online_output="kept"))
    made = configure(config, CorePlan((0,), (0,), (0,)), tmp_path).draft
    assert (made.online, made.online_share, made.online_output) == (True, 0.1, "kept")
