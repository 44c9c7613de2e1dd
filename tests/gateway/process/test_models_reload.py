"""The file of --models, read again: which models run, and which one of two of a name is served. Runners are fakes."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.process import models_reload
from gateway.process.models_file import model_configs
from gateway.process.models_reload import ModelsReload
from outrider.config import GatewayConfig
from outrider.errors import ConfigError


class Runner:
    """A model whose first target comes when `up` is set."""

    def __init__(self, config):
        if config.balance_rel_threshold < 1:  # as the real one refuses some numbers
            raise ConfigError("a number does not fit")
        self.config, self.name = config, config.served_model_name[0]
        self.served = SimpleNamespace(runner=self, ready=False, running=object())
        self.up, self.open_sessions, self.events = asyncio.Event(), 0, []
        self.former = []
        self.took = self.next = None

    def take_decisions(self, before):
        self.took = before

    def set_next(self, after):
        self.next = after

    def replace(self, before):
        self.former.append(before)

    def release(self, before):
        if before in self.former:
            self.former.remove(before)

    async def open(self):
        self.events.append("open")

    def start(self):
        self.events.append("start")

    async def begin(self):
        await self.up.wait()
        self.served.ready = True

    async def follow(self):
        pass

    def withdraw(self):
        self.events.append("withdraw")

    async def stop(self):
        self.events.append("stop")


class Gateway:
    """The models of a file that is read again."""

    def __init__(self, file):
        self.file, self.served, self.made, self.hangup = file, [], [], asyncio.Event()
        config = GatewayConfig(models=str(file))
        self.made = [self.make(one) for one in model_configs(config)]
        self.first = list(self.made)
        for runner in self.first:
            runner.served.ready = True
        models = SimpleNamespace(set=lambda found: self.served.append([one.runner for one in found]))
        self.reload = ModelsReload(config, models, self.first, self.make, lambda: None)
        self.following = asyncio.create_task(self.reload.follow(self.hangup))

    def make(self, config):
        self.made.append(Runner(config))
        return self.made[-1]

    async def read(self, content):
        self.file.write_text(content)
        self.hangup.set()
        await asyncio.sleep(0.01)


@pytest.fixture
async def gateway(tmp_path, monkeypatch):
    monkeypatch.setattr(models_reload, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(models_reload, "_POLL_SECONDS", 0.005)
    file = tmp_path / "models.toml"
    file.write_text('[a]\ntarget = "x:1"\n[b]\ntarget = "y:1"\n')
    found = Gateway(file)
    yield found
    found.following.cancel()
    await found.reload.stop()


async def test_models_join_and_leave(gateway):
    a, b = gateway.first
    b.open_sessions = 1
    await gateway.read('[c]\n[a]\ntarget = "x:1"\n')
    c = gateway.made[-1]
    assert gateway.served[-1] == [c, a]
    assert (c.events, b.events) == (["open", "start"], ["withdraw"])
    assert not a.events
    await asyncio.sleep(0.02)
    assert "stop" not in b.events  # its requests run to their end
    b.open_sessions = 0
    await asyncio.sleep(0.02)
    assert b.events == ["withdraw", "stop"]


async def test_a_changed_model_serves_as_it_was_until_its_target_is_up(gateway):
    a, b = gateway.first
    await gateway.read('[a]\ntarget = "x:2"\n[b]\ntarget = "y:1"\n')
    first = gateway.made[-1]
    assert gateway.served[-1] == [a, b]
    assert first.took is a
    assert a.next is first
    await gateway.read('[a]\ntarget = "x:3"\n[b]\ntarget = "y:1"\n')  # the first change never came up
    second = gateway.made[-1]
    assert a.next is second
    await asyncio.sleep(0.02)
    assert first.events == ["start", "stop"]  # the one that serves answers the other workers
    a.open_sessions = 1
    second.up.set()
    await asyncio.sleep(0.02)
    assert gateway.served[-1] == [second, b]
    assert second.former == [a]  # whose session runs on in the pools of the second
    a.open_sessions = 0
    await asyncio.sleep(0.02)
    assert second.former == []
    assert a.events == ["stop"]  # without withdrawing what the new one of its name answers


@pytest.mark.parametrize(("ready", "table"), [(False, 'target = "x:2"\n'), (True, 'draft = "z:1"\n')])
async def test_a_model_that_is_away_or_has_no_more_targets_is_replaced_at_once(gateway, ready, table):
    a, b = gateway.first
    a.served.ready = ready
    await gateway.read(f'[a]\n{table}[b]\ntarget = "y:1"\n')
    assert gateway.served[-1] == [gateway.made[-1], b]
    assert gateway.made[-1].name == "a"


@pytest.mark.parametrize("content", ["[a", "[a]\ntarget = 5\n", "[c]\n[b]\nbalance-rel-threshold = 0.5\n"])
async def test_a_mistake_changes_nothing(gateway, content, caplog):
    await gateway.read(content)
    assert not gateway.served
    assert "the models stay as they were" in caplog.text
    assert not any(runner.events for runner in gateway.made)
    await gateway.read('[b]\ntarget = "y:1"\n')
    assert gateway.served[-1] == gateway.first[1:]
