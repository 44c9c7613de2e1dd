"""The pool of a model changes hands while its file is read again: real targets, and streams that lose nothing."""

import contextlib
import signal

import pytest

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway, until
from tests.support.gateway.streaming import Stream, started
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_model, write_tokenizer

PROMPTS = [list(range(first, first + 40)) for first in (3, 60, 120)]
OPTIONS = {"max_tokens": 400, "seed": 7, "ignore_eos": True, "return_token_ids": True}
REQUESTS = [{"prompt": prompt, "temperature": heat} for prompt in PROMPTS for heat in (0, 0.8)]
SLOW = 0.05  # seconds of rest after a step, so that no stream ends before its target leaves


class System:
    """Targets and drafts by their names in addresses, and a gateway whose file of models names some of them."""

    def __init__(self, folder, model):
        self.folder = folder
        self.targets = {name: target_service(model, f"unix:{folder}/{name}") for name in ("first", "second", "third")}
        self.drafts = {name: draft_service(f"unix:{folder}/{name}", self.drafter) for name in ("draft", "other")}
        self.services = self.targets | self.drafts
        self.running = set()
        self.file = folder / "models.toml"

    @staticmethod
    def drafter():
        return NgramDrafter(NgramOptions())

    def start(self, *names):
        for name in names:
            self.services[name].start()
            self.running.add(name)

    def stop(self, *names):
        """As a crash does."""
        for name in names:
            self.running.discard(name)
            self.services[name].stop()

    def write(self, targets, drafts=("draft",), timeout=600):
        addresses = [[self.services[name].address for name in names] for names in (targets, drafts)]
        self.file.write_text(f"[m]\ntarget = {addresses[0]}\ndraft = {addresses[1]}\nrequest-timeout = {timeout}\n")

    def read(self, *arguments, **options):
        """Let the gateway read a changed table."""
        self.write(*arguments, **options)
        self.gateway.process.send_signal(signal.SIGHUP)

    def listed(self):
        """Each replica of the gateway by its name."""
        found = self.gateway.client.get("/workers", headers=self.gateway.admin).json()["workers"]
        return {one["address"].rpartition("/")[2]: one for one in found}

    def add(self, name):
        body = {"url": self.services[name].address}
        self.gateway.client.post("/workers", json=body, headers=self.gateway.admin).raise_for_status()

    def remove(self, name, query=""):
        route = f"/workers/{self.services[name].address}{query}"
        self.gateway.client.delete(route, headers=self.gateway.admin).raise_for_status()

    def sessions(self, name):
        """Sessions that an engine has."""
        engine = self.services[name].engine
        return len(engine.running) + len(engine.waiting) if name in self.drafts else len(engine.sessions.by_id)

    def texts(self):
        """Tokens of each request, one after the other."""
        return [self.gateway.complete(**one, **OPTIONS)["choices"][0]["token_ids"] for one in REQUESTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("takeover") / "model", seed=1, num_hidden_layers=2))


@pytest.fixture
def system(tmp_path, model, request):
    """Two targets and a draft run; the first target serves."""
    system = System(tmp_path, model)
    system.start("first", "second", "draft")
    system.write(["first"])
    flags = {"gateway_workers": request.param} if getattr(request, "param", 1) > 1 else {}
    system.gateway = Gateway(tmp_path, None, models=system.file, **flags)
    try:
        system.gateway.wait()
        yield system
        until(lambda: not any(map(system.sessions, system.running)))
    finally:
        code = system.gateway.stop()
        system.stop(*list(system.running))
    assert code == 0


@contextlib.contextmanager
def streams(system):
    """Streams of all requests on the first target, which go on inside; each must have the undisturbed text."""
    plain = system.texts()
    for target in system.targets.values():
        target.pause = SLOW
    found = [Stream(system.gateway, **one, **OPTIONS) for one in REQUESTS]
    for stream in found:
        started(stream)
    assert system.sessions("first") == len(found)
    try:
        yield
        assert all(stream.is_alive() for stream in found)
    finally:
        for target in system.targets.values():
            target.pause = 0.0
        for stream in found:
            stream.join(60)
    assert [stream.error for stream in found] == [None] * len(found)
    assert [stream.tokens for stream in found] == plain
    assert {stream.reason for stream in found} == {"length"}
    assert system.texts() == plain  # of the changed table


@pytest.mark.sampled(2)
@pytest.mark.parametrize("system", [1, 2], indirect=True, ids=["one worker", "two workers"])
@pytest.mark.parametrize("leaves", ["drained", "killed"])
def test_a_target_takes_over_while_the_models_are_read_again(system, leaves):
    """The changed table names a target that comes later; the one that is added takes over before."""
    with streams(system):
        system.read(["third"], timeout=500)
        until(lambda: "third" in system.listed())
        system.add("second")
        if leaves == "drained":
            system.remove("first")
            until(lambda: "first" not in system.listed())
            until(lambda: not system.sessions("first"), 5)
        else:
            system.stop("first")
        until(lambda: system.sessions("second") == len(REQUESTS))
    system.start("third")
    until(lambda: system.listed()["third"]["state"] == "ready")
    system.remove("second")
    until(lambda: "second" not in system.listed())
    assert len(system.texts()) == len(REQUESTS)


@pytest.mark.parametrize("leaves", ["drained", "killed"])
def test_a_target_that_the_changed_table_alone_names_takes_over(system, leaves):
    with streams(system):
        if leaves == "drained":
            system.read(["second"])
            until(lambda: "first" not in system.listed())
            until(lambda: not system.sessions("first"), 5)
        else:
            system.read(["first", "second"])
            until(lambda: system.listed().get("second", {}).get("state") == "ready")
            system.stop("first")
        until(lambda: system.sessions("second") == len(REQUESTS))


def test_targets_leave_after_a_change_whose_former_requests_still_run(system):
    """What the API adds and removes later holds for them, too, also after further changes."""
    with streams(system):
        system.read(["first"], timeout=500)
        until(lambda: system.gateway.log.read_text().count("was read again") == 1)
        system.read(["first"], timeout=400)
        until(lambda: system.gateway.log.read_text().count("was read again") == 2)
        until(lambda: system.listed()["first"]["next"] is None)
        assert system.listed()["first"]["sessions"] == len(REQUESTS)
        system.add("second")
        system.remove("first")
        until(lambda: "first" not in system.listed())
        until(lambda: not system.sessions("first"), 5)
        assert system.sessions("second") == len(REQUESTS)


def test_another_draft_takes_over(system):
    system.start("other")
    with streams(system):
        assert system.listed()["draft"]["sessions"] == len(REQUESTS)
        system.read(["first"], drafts=["other"])
        until(lambda: system.listed().get("other", {}).get("sessions") == len(REQUESTS))
        until(lambda: "draft" not in system.listed())
        system.stop("draft")
        until(lambda: system.gateway.metric("outrider_service_up", service="draft") == 1)
