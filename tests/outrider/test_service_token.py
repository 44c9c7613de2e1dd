"""The token of the services: its file, and which listeners need one."""

import stat
import threading

import pytest

from outrider.cli import main
from outrider.config import DraftConfig, TargetConfig
from outrider.errors import ConfigError, Unauthenticated
from outrider.service_token import VARIABLE, is_local, make_token_file, read_token, token_check, token_metadata
from services.draft.process import app as draft_app
from services.target.process import app as target_app

TOKEN = "a-token-of-the-tests"


def test_a_new_file_is_private_and_stays_as_it_is(tmp_path):
    path = tmp_path / "token"
    assert main(["token", str(path)]) == 0
    first = read_token(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(first) >= 40
    make_token_file(path)
    assert read_token(str(path)) == first
    assert list(tmp_path.iterdir()) == [path]
    make_token_file(path, {VARIABLE: TOKEN})
    assert read_token(str(path)) == TOKEN


def test_processes_that_make_the_file_together_agree(tmp_path):
    path, found = tmp_path / "token", []
    start = threading.Barrier(8)

    def make():
        start.wait()
        make_token_file(path)
        found.append(read_token(str(path)))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_the_file_precedes_the_environment(tmp_path):
    path = tmp_path / "token"
    path.write_text(f" {TOKEN}\n")
    assert read_token(str(path), {VARIABLE: "b" * 20}) == TOKEN
    assert read_token(None, {VARIABLE: "b" * 20}) == "b" * 20
    assert read_token(None, {VARIABLE: ""}) is None
    assert read_token(None, {}) is None


NO_TOKENS = [b"", b"short", b"two words that are long", "ümläute-are-no-ascii".encode(), b"\xff\xfe"]


@pytest.mark.parametrize("content", NO_TOKENS)
def test_what_is_no_token_is_refused_without_being_shown(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="outrider token") as error:
        read_token(str(path))
    assert not content or content.decode(errors="replace") not in error.value.message


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file"):
        read_token(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"cannot be written: No such file"):
        make_token_file(tmp_path / "no" / "folder")


def test_only_the_token_passes():
    check = token_check(TOKEN)
    check(dict(token_metadata(TOKEN)))
    for metadata, words in (({}, "no service token"), (dict(token_metadata(TOKEN + "x")), "another service token")):
        with pytest.raises(Unauthenticated, match=words):
            check(metadata)
    assert token_check(None) is None
    assert token_metadata(None) == ()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/a.sock", True), ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True),
        ("localhost:1", True), ("ipv4:127.0.0.1:1", True), ("dns:///localhost:1", True),
        ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("ipv4:0.0.0.0:1", False), (":1", False),
        ("no-such-host.invalid:1", False), ("*:1", False),
    ],
)  # fmt: skip
def test_addresses_that_other_machines_reach_are_recognized(address, local):
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("app", "config"),
    [(target_app, TargetConfig(listen="0.0.0.0:1")), (draft_app, DraftConfig(listen="0.0.0.0:1"))],
    ids=["target", "draft"],
)
async def test_a_service_is_not_open_to_strangers_unless_a_flag_says_so(tmp_path, app, config, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:1 .*--service-token-file.*--ssl-ca-certs.*--allow-unauthent"):
        await app.serve(config)
    kind = type(config)
    assert kind(listen="127.0.0.1:1").port_security("127.0.0.1:1") == (None, None)
    assert kind(allow_unauthenticated=True).port_security("0.0.0.0:1") == (None, None)
    make_token_file(tmp_path / "token", {VARIABLE: TOKEN})
    assert kind(service_token_file=str(tmp_path / "token")).port_security("0.0.0.0:1") == (None, TOKEN)


def test_a_client_certificate_is_enough_and_a_server_certificate_is_not(tmp_path, monkeypatch):
    from tests.support.certificates import Authority

    monkeypatch.delenv(VARIABLE, raising=False)
    authority = Authority(tmp_path, "ours")
    certificate = authority.certificate("a.example")
    tls, token = TargetConfig(**certificate.flags("ssl", authority.ca_certs)).port_security("0.0.0.0:1")
    assert tls is not None
    assert token is None
    with pytest.raises(ConfigError, match="no token or client certificate is required"):
        TargetConfig(**certificate.flags()).port_security("0.0.0.0:1")
