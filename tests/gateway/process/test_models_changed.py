"""A changed table of the file of --models until its first target is up, with real runners."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.admission.admission import Admission, Keys
from gateway.control.models import Models
from gateway.facade import facades
from gateway.pools.members import Service
from gateway.process.app import _serve_facades
from gateway.process.model import ModelRunner
from gateway.process.models_file import model_configs
from gateway.process.models_reload import ModelsReload
from gateway.sessions.request import GenerationRequest, StopOptions
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.errors import Unavailable
from outrider.speculation.sampling import SamplingParams

TARGET = "unix:/none/target"
TABLE = '[a]\ntarget = "{}"\nrequest-timeout = {}\n'


class Coming(ModelRunner):
    """A model whose first target is up once `up` is set."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.up = asyncio.Event()

    async def begin(self):
        await self.up.wait()


class Gateway:
    """A model that serves, and its file."""

    def __init__(self, file):
        self._file = file
        self._config = GatewayConfig(models=str(file))
        self.peers, self.made = Peers(), []
        self._options = {"peers": self.peers, "admission": Admission(8), "report": lambda: None, "alone": False}
        file.write_text(TABLE.format(TARGET, 1))
        self.first = ModelRunner(*model_configs(self._config), **self._options)
        known = self.first.served.health.orchestrator
        control = SimpleNamespace(retire=lambda _: None)
        self.first.served.running = SimpleNamespace(control=control, generator=None, facts=None)
        self.first.served.health = SimpleNamespace(ready=True, orchestrator=known)
        self.models = Models([self.first.served], self.peers)
        self._reload = ModelsReload(self._config, self.models, [self.first], self._make, lambda: None)

    def _make(self, config):
        self.made.append(Coming(config, **self._options))
        return self.made[-1]

    async def read(self, seconds, target=TARGET):
        """Read a table with this --request-timeout, of which a target is up later."""
        self._file.write_text(TABLE.format(target, seconds))
        self._reload._apply(model_configs(self._config))
        await asyncio.sleep(0.01)

    @property
    def decided(self):
        """Addresses of which another worker knows here."""
        return [one["address"] for one in self.peers._answers["a:decisions"](None)]

    async def stop(self):
        await self._reload.stop()


@pytest.fixture
async def gateway(tmp_path):
    found = Gateway(tmp_path / "models.toml")
    await found.first.open()
    found.first.start()
    yield found
    await found.stop()


async def test_a_table_that_is_read_twice_comes_once(gateway):
    await gateway.read(2)
    await gateway.read(2)
    (coming,) = gateway.made
    assert list(gateway.models) == [gateway.first.served]
    coming.up.set()
    await asyncio.sleep(0.01)
    assert list(gateway.models) == [coming.served]


async def test_a_change_that_is_taken_back_leaves_the_model_to_the_other_workers(gateway):
    await gateway.read(2)
    await gateway.read(1)
    assert list(gateway.models) == [gateway.first.served]
    await gateway.first.served.replicas.add(Service.TARGET, "unix:/none/added")
    assert gateway.decided == ["unix:/none/added"]
    gateway.made[0].up.set()
    await asyncio.sleep(0.01)
    assert list(gateway.models) == [gateway.first.served]


def states(runner):
    """State of each replica of a model, and in the pools that are to replace its own."""
    return {
        one["address"]: (one["state"], one["next"] and one["next"]["state"]) for one in runner.served.replicas.own()
    }


async def test_replicas_added_while_a_change_comes_are_in_both_pools(gateway):
    await gateway.read(2)
    (coming,) = gateway.made
    await gateway.first.served.replicas.add(Service.TARGET, "unix:/none/added")
    assert states(gateway.first) == dict.fromkeys(("unix:/none/target", "unix:/none/added"), ("unreachable",) * 2)
    assert [one.address for one in coming.links._orchestrator.targets] == ["unix:/none/target", "unix:/none/added"]
    coming.up.set()  # such a target may be the first one of the changed table
    await asyncio.sleep(0.01)
    assert list(gateway.models) == [coming.served]
    assert states(coming) == dict.fromkeys(("unix:/none/target", "unix:/none/added"), ("unreachable", None))
    await coming.served.replicas.add(Service.TARGET, "unix:/none/later")
    assert gateway.decided == ["unix:/none/added", "unix:/none/later"]


async def test_the_pools_of_former_sessions_are_those_of_the_changed_table(gateway):
    sessions = gateway.first.served.health.orchestrator.sessions
    sessions.open(GenerationRequest([0], SamplingParams(), StopOptions(1)))  # waits for a target
    await gateway.first.served.replicas.add(Service.TARGET, "unix:/none/added")
    former = gateway.first.links._orchestrator
    for seconds in (2, 3):  # twice, so that the first one's pools follow the third one's
        await gateway.read(seconds, target="unix:/none/next")
        gateway.made[-1].up.set()
        await asyncio.sleep(0.01)
        gateway.made[-1].served.running = gateway.first.served.running
        gateway.made[-1].served.health = SimpleNamespace(ready=True, orchestrator=gateway.made[-1]._orchestrator)
        assert {one.address for one in former.targets} == {"unix:/none/added", "unix:/none/next"}
    (present,) = gateway.models
    await present.replicas.remove("unix:/none/added", drain=False)
    await present.replicas.add(Service.DRAFT, "unix:/none/draft")
    await asyncio.sleep(0.01)
    assert [one.address for one in former.targets] == ["unix:/none/next"]
    assert [one["address"] for one in present.replicas.own()] == ["unix:/none/next", "unix:/none/draft"]


async def test_replicas_of_the_changed_table_are_shown_and_can_be_removed(gateway):
    await gateway.read(2, target="unix:/none/next")
    (coming,) = gateway.made
    present = {"unix:/none/target": ("unreachable", None)}
    assert states(gateway.first) == {**present, "unix:/none/next": ("coming", "unreachable")}
    await gateway.first.served.replicas.remove("unix:/none/next", drain=True)
    await gateway.first.served.replicas.remove("unix:/none/target", drain=False)  # no name of the changed table
    await asyncio.sleep(0.01)
    assert states(gateway.first) == states(coming) == {}
    await gateway.first.served.replicas.add(Service.TARGET, "unix:/none/next")
    await gateway.read(1)  # taken back
    assert states(gateway.first) == {"unix:/none/next": ("unreachable", None)}


async def test_a_request_that_comes_after_its_model_has_left_is_refused(gateway):
    """It has chosen the model before, and took long to be read."""
    sessions = gateway.first.served.health.orchestrator.sessions
    request = GenerationRequest([0], SamplingParams(), StopOptions(1))
    assert sessions.open(request).target is None  # its target may come
    await gateway.first.stop()
    assert not sessions.by_id
    with pytest.raises(Unavailable, match="the model `a` serves no longer"):
        sessions.open(request)


async def test_facades_serve_no_former_default_model(gateway):
    (facade,) = facades(("sglang",))
    gateway.first.served.running = SimpleNamespace(generator=None, facts=None, control=None)
    keys = Keys(GatewayConfig())
    _serve_facades([facade], gateway.models, keys, None)
    assert facade._backend is not None
    gateway.first.served.running = None
    _serve_facades([facade], gateway.models, keys, None)
    assert facade._backend is None
