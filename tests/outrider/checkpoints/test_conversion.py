"""Converted models in the cache: damage and full disks are named, with what to do."""

import errno
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.checkpoints import checkpoint, conversion, disk
from outrider.checkpoints.checksums import CHECKSUMS, damage, write_checksums
from outrider.doctor import services
from outrider.errors import ConfigError


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A GGUF file that is converted already."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" * 100)
    folder = conversion.place_of(file)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    write_checksums(folder)
    return file


def flip(file):
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("harm", "words", "seen_by_all"), [
    (flip, "model.safetensors has other bytes", False),
    (lambda file: file.write_bytes(file.read_bytes()[:-8]), "model.safetensors has 40.. bytes instead of 40..", True),
    (lambda file: file.unlink(), "model.safetensors is missing", True),
    (lambda file: (file.parent / CHECKSUMS).write_text("[]"), "checksums.json cannot be read", True),
])  # fmt: skip
def test_damage_names_the_folder_to_delete(gguf, harm, words, seen_by_all):
    folder = conversion.place_of(gguf)
    assert checkpoint.resolve(str(gguf), whole=True) == folder
    harm(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"in {folder} is damaged: {words}.*; delete that folder and start again"):
        checkpoint.resolve(str(gguf), whole=True)
    if seen_by_all:
        with pytest.raises(ConfigError, match="is damaged"):
            checkpoint.resolve(str(gguf))
    else:  # all bytes are read by those who load the weights, and by `outrider doctor`
        assert checkpoint.resolve(str(gguf)) == folder
    assert [one.remedy for one in services.converted()] == [f"delete {folder}"]


def test_conversions_of_earlier_releases_get_checksums(gguf):
    folder = conversion.place_of(gguf)
    (folder / CHECKSUMS).unlink()
    assert checkpoint.resolve(str(gguf)) == folder
    assert not (folder / CHECKSUMS).exists()
    checkpoint.resolve(str(gguf), whole=True)
    assert {*json.loads((folder / CHECKSUMS).read_text())} == {"config.json", "model.safetensors"}
    flip(folder / "model.safetensors")
    assert "other bytes" in damage(folder, whole=True)


def test_full_disks_are_recognized():
    wrapped = RuntimeError("the library's own")
    wrapped.__cause__ = OSError(errno.ENOSPC, disk.FULL)
    full = (OSError(errno.EDQUOT, "x"), ValueError("I/O error (os error 28)"), RuntimeError(disk.FULL), wrapped)
    assert all(map(disk.is_full, full))
    assert not any(map(disk.is_full, (OSError(errno.EACCES, "x"), ValueError("os error 2"))))
