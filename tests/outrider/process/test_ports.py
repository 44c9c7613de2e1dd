"""Paths of Unix domain sockets, and folders for them."""

import socket
import tempfile

import pytest

from outrider.errors import ConfigError
from outrider.process.ports import check_socket_path, socket_folder
from outrider.transport.rpc import GrpcServer


@pytest.fixture
def long_folder(tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder


async def test_impossible_socket_paths_are_refused_with_the_reason(tmp_path, long_folder):
    check_socket_path("/tmp/" + "x" * 102)
    for path, words in (
        ("", "names no path"),
        ("/tmp/" + "x" * 103, "at most 107 bytes, and /tmp/x+ has 108"),
        ("/tmp/" + "ü" * 52, "has 109; choose another"),
        (f"{tmp_path}/no/x", f"there is no folder {tmp_path}/no for the socket"),
    ):
        with pytest.raises(ConfigError, match=words):
            await GrpcServer().start(f"unix:{path}", ())


@pytest.mark.parametrize("prefix", ["outrider-", "outrider-gateway-"])
def test_sockets_have_a_folder_of_their_own_however_long_the_usual_path(monkeypatch, long_folder, prefix):
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    with socket_folder(prefix) as folder, socket.socket(socket.AF_UNIX) as one:
        assert folder.stat().st_mode & 0o777 == 0o700
        one.bind(f"{folder}/gateway.sock.frames")
    assert not folder.exists()


def test_the_usual_folder_is_used_where_its_path_is_short(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as usual:
        monkeypatch.setattr(tempfile, "tempdir", usual)
        with socket_folder("outrider-") as folder:
            assert str(folder.parent) == usual


def test_an_unwritable_folder_for_sockets_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR to a writable folder"), socket_folder("outrider-"):
        pass
