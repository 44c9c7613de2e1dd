"""Compiled libraries in their folders: damaged ones are compiled again, and a full disk is named."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider import native
from outrider.native import Library, Unavailable


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "seven.cpp").write_text('extern "C" int seven() { return 7; }')
    return Library("seven", tmp_path / "source", ("-O0", "-fPIC"))


def test_a_damaged_library_is_compiled_again(library):
    """Calling it could crash the process, or change a text."""
    path = library.compiled()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert library.loaded().seven() == 7
    assert path.read_bytes()[-1] == whole[-1]
    first = path.stat().st_mtime_ns
    assert library.compiled().stat().st_mtime_ns == first


def test_replicas_that_start_together_compile_once(library, tmp_path, monkeypatch):
    real = next(path for path in map(shutil.which, native.COMPILERS) if path)
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "COMPILERS", (str(compiler),))
    name, folders = library._places()
    killed = folders[0] / f"{name}.killed.partial"
    killed.mkdir(parents=True)
    with ThreadPoolExecutor(3) as replicas:
        paths = {replica.result() for replica in [replicas.submit(library.compiled) for _ in range(3)]}
    assert len(paths) == 1
    assert len(calls.read_text().splitlines()) == 2  # one source, and the library
    assert not killed.exists()


def test_a_full_disk_is_named(library, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: error writing to x.o: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "COMPILERS", (str(compiler),))
    with pytest.raises(Unavailable, match=r"environment/lib/outrider: No space left.*cache/kernels: No space left"):
        library.compiled()
