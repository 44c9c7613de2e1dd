"""Who is a member of a pool: flags, DNS names, files of addresses and the API, in one event loop."""

import asyncio
import socket

import pytest

from gateway.pools.addresses import Kind, check_address, parse
from gateway.pools.discovery import Discovery, addresses_in, lookup
from gateway.pools.members import Decision, Members, Service, id_of
from outrider.errors import ConfigError

TARGET, DRAFT = Service


class Pool:
    """Members, and the events that they report."""

    def __init__(self, *names, worker=0, drafts=()):
        self.names = [parse(name) for name in names]
        self.members = Members(self.names, map(parse, drafts))
        self.events = []
        self.members.on_join = lambda member: self.add(member, "+")
        self.members.on_leave = lambda member, drain: self.add(member, "-" if drain else "!")
        self.time, self.worker = 0, worker

    def add(self, member, sign):
        if member.service is TARGET:
            self.events.append(sign + member.address)

    def decide(self, address, *, added, drain=True):
        self.time += 1
        decision = Decision(TARGET, address, added, drain, (self.time, self.worker))
        assert self.members.decide(decision)
        return next(one for one in self.members.decisions if one.address == address)

    def find(self, *addresses):
        """DNS finds these addresses, of the first name."""
        self.members.set_addresses(TARGET, self.names[0], addresses)

    @property
    def addresses(self):
        return [member.address for member in self.members.of(TARGET)]


@pytest.mark.parametrize(
    ("text", "kind", "host", "port"),
    [
        ("gpu1:30010", Kind.ADDRESS, "", 0),
        ("unix:/run/t", Kind.ADDRESS, "", 0),
        ("dns:targets:50051", Kind.DNS, "targets", 50051),
        ("dns:///targets.ns.svc:50051", Kind.DNS, "targets.ns.svc", 50051),
        ("dns:[::1]:50051", Kind.DNS, "::1", 50051),
        ("file:/etc/targets", Kind.FILE, "", 0),
        ("file:///etc/targets", Kind.FILE, "", 0),
    ],
)
def test_names_of_replicas(text, kind, host, port):
    named = parse(text)
    assert (named.kind, named.host, named.port) == (kind, host, port)
    assert kind is not Kind.FILE or str(named.path) == "/etc/targets"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dns:targets", "HOST:PORT"),
        ("dns:targets:http", "'http' is no port"),
        ("dns://8.8.8.8/targets:1", "DNS server 8.8.8.8"),
        ("file:", "names no file"),
    ],
)
def test_names_that_cannot_be_read(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text)


def test_addresses_of_one_replica():
    assert [check_address(text) for text in ("grpc://a:1", " a:1/ ", "unix:/x", "[::1]:2")] == [
        "a:1", "a:1", "unix:/x", "[::1]:2",
    ]  # fmt: skip
    for text, words in (
        ("http://a:1", "HTTP"), ("dns:a:1", "--target"), ("a", "HOST:PORT"), ("::1:2", "IPv6"), ("a:0", "no port"),
        ("unix:", "path"), ("a b:1", "HOST:PORT"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            check_address(text)


def test_a_file_names_one_replica_a_line(caplog):
    text = "gpu1:1  # the first\n\n# none\ngrpc://gpu2:2\nnonsense\ngpu1:1\n"
    assert addresses_in(text, "/etc/targets") == ["gpu1:1", "gpu2:2"]
    assert "line 5 of /etc/targets is skipped" in caplog.text


def test_a_replica_is_a_member_while_anything_names_it():
    pool = Pool("dns:name:1", "b:1")
    assert pool.addresses == ["b:1"]
    pool.find("a:1", "b:1")
    pool.decide("a:1", added=True)
    assert pool.events == ["+a:1"]
    assert pool.members.find(TARGET, "a:1").sources == ("dns:name:1", "api")
    assert pool.members.find(TARGET, "b:1").named
    assert not pool.members.find(TARGET, "a:1").named
    pool.find()
    assert pool.events == ["+a:1"]  # the API and the flag name them
    pool.decide("a:1", added=False, drain=False)
    assert pool.events == ["+a:1", "!a:1"]
    assert pool.addresses == ["b:1"]


def test_the_order_of_the_flags_is_that_of_the_ranks():
    pool = Pool("dns:name:1", "b:1")
    pool.decide("c:1", added=True)
    pool.find("a:1")
    assert {member.address: member.rank for member in pool.members.of(TARGET)} == {"b:1": 1, "c:1": 2, "a:1": 0}
    assert pool.members.find(TARGET, "a:1").host == "name"  # that its certificate carries


def test_later_members_take_what_still_holds_of_earlier_decisions():
    """As of a worker that has restarted: a flag names a:1, which the API removed before."""
    before, later = Pool("dns:name:1"), Pool("a:1", "b:1")
    before.find("b:1")
    before.decide("a:1", added=True)
    before.decide("a:1", added=False)
    before.decide("b:1", added=False)
    before.decide("c:1", added=True)
    for decision in before.members.decisions:
        later.members.take(decision)
    assert later.addresses == ["a:1", "c:1"]
    later.members.take(before.decide("c:1", added=False))
    assert later.addresses == ["a:1"]


def test_a_removal_holds_while_a_name_lasts():
    pool = Pool("dns:name:1")
    pool.find("a:1", "b:1")
    pool.decide("a:1", added=False)
    pool.find("a:1", "b:1", "c:1")
    assert pool.addresses == ["b:1", "c:1"]
    pool.find("b:1", "c:1")
    pool.find("a:1", "b:1", "c:1")  # a new replica at the address of the old one
    assert pool.addresses == ["b:1", "c:1", "a:1"]
    pool.decide("b:1", added=False)
    pool.decide("b:1", added=True)
    assert pool.addresses == ["c:1", "a:1", "b:1"]
    assert pool.events == ["+a:1", "+b:1", "-a:1", "+c:1", "+a:1", "-b:1", "+b:1"]


def test_workers_agree_whatever_the_order_of_decisions():
    one, two = Pool("dns:name:1"), Pool("dns:name:1", worker=1)
    one.find("a:1")
    made = [one.decide("b:1", added=True), one.decide("a:1", added=False), one.decide("b:1", added=False)]
    for decision in (made[2], made[0], made[1], made[0]):
        two.members.decide(Decision.from_json(decision.to_json()))
    two.find("a:1")  # a worker that starts later looks at DNS after it has the decisions
    assert one.addresses == two.addresses == []
    assert id_of(TARGET, "a:1") != id_of(DRAFT, "a:1")


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_dns_is_asked_again_and_a_failure_changes_nothing(caplog):
    answers, asked = {"name": ["10.0.0.1:5", "10.0.0.2:5"]}, []

    async def lookup(host, port):
        asked.append((host, port))
        if host not in answers:
            raise OSError(-2, "Name or service not known")
        return answers[host]

    pool = Pool("dns:name:5", "b:1")
    discovery = Discovery(pool.members, 0.02, lookup)
    discovery.start()
    try:
        await until(lambda: len(pool.addresses) == 3)
        answers["name"] = ["10.0.0.2:5", "10.0.0.3:5"]
        await until(lambda: "10.0.0.3:5" in pool.addresses)
        assert pool.events[2:] == ["-10.0.0.1:5", "+10.0.0.3:5"]
        del answers["name"]
        await until(lambda: discovery.failures)
        assert discovery.failures[TARGET, "dns:name:5"] == "Name or service not known"
        count = len(asked)
        await until(lambda: len(asked) > count + 2)
        assert set(pool.addresses) == {"10.0.0.2:5", "10.0.0.3:5", "b:1"}
        assert caplog.text.count("the targets that it named stay as they are") == 1
        answers["name"] = ["10.0.0.3:5"]
        await until(lambda: not discovery.failures)
        assert set(pool.addresses) == {"10.0.0.3:5", "b:1"}
        assert set(asked) == {("name", 5)}
    finally:
        await discovery.stop()


@pytest.mark.parametrize(
    ("found", "expected"),
    [(["10.0.0.1", "::1", "10.0.0.2"], ["10.0.0.1:5", "10.0.0.2:5"]), (["::1", "fd00::2"], ["[::1]:5", "[fd00::2]:5"])],
)
async def test_a_replica_with_addresses_of_both_families_is_one(monkeypatch, found, expected):
    def resolve(host, port, type):  # noqa: A002 - as in the module
        assert (host, port) == ("name", 5)
        families = [(socket.AF_INET6 if ":" in one else socket.AF_INET, one) for one in found]
        return [(family, type, 6, "", (one, port)) for family, one in families]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert await lookup("name", 5) == expected


async def test_a_lost_replica_causes_a_look(monkeypatch):
    monkeypatch.setattr("gateway.pools.discovery._MIN_INTERVAL", 0.01)
    asked = 0

    async def lookup(host, port):
        nonlocal asked
        asked += 1
        return [f"10.0.0.{asked}:{port}"]

    pool = Pool("dns:name:5")
    discovery = Discovery(pool.members, 600, lookup)
    discovery.start()
    try:
        await until(lambda: asked == 1)
        await asyncio.sleep(0.05)
        discovery.look_now(DRAFT)
        await asyncio.sleep(0.05)
        assert asked == 1
        discovery.look_now(TARGET)
        await until(lambda: pool.addresses == ["10.0.0.2:5"])
    finally:
        await discovery.stop()


async def test_a_file_is_read_again_once_it_is_whole(tmp_path):
    path = tmp_path / "targets"
    pool = Pool(f"file:{path}", drafts=[f"file:{path}"])
    discovery = Discovery(pool.members, 0.02)
    discovery.start()
    try:
        await until(lambda: discovery.failures)  # it is not there yet
        path.write_text("a:1\nb:1\n")
        await until(lambda: pool.addresses == ["a:1", "b:1"])
        path.write_text("")  # a writer begins anew ...
        await asyncio.sleep(0.06)
        path.write_text("b:1\nc:1\n")  # ... and ends
        await until(lambda: "c:1" in pool.addresses)
        assert pool.events == ["+a:1", "+b:1", "-a:1", "+c:1"]
        path.unlink()
        await until(lambda: discovery.failures)
        assert pool.addresses == ["b:1", "c:1"]
        assert [member.address for member in pool.members.of(DRAFT)] == ["b:1", "c:1"]  # it names both
    finally:
        await discovery.stop()


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--discovery-interval must be more than 0"):
        Discovery(Members(), 0.0)
