"""Packed weights are kept for the next start: it reads the same numbers, and packs anew what is damaged."""

import logging

import pytest
from safetensors.torch import load_file

from outrider.config import TargetConfig
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices import packed_file
from services.target.model import program_builder
from services.target.model.dense.load import load_dense
from tests.support.target.driving import engine_of, opening, run
from tests.support.target.self_speculation import drafting
from tests.support.tiny import write_model

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")

WAYS = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "copy": {"self_speculation": "quantized", "dtype": "bfloat16"},  # with a pruned head
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(program_builder, "MIN_PRUNED_OUTPUTS", 8)
    return tmp_path / "cache" / "packed"


def loaded(folder, **flags):
    return load_dense(folder, TargetConfig(**({"device": "cpu", "dtype": "float32"} | flags)))


def outcome(model):
    """Two texts, and how many draft tokens of a copy were right."""
    engine = (drafting if model.copied else engine_of)(model)
    found = run(engine, [opening(1, [5, 6, 7]), opening(2, list(range(3, 40)))])
    return found.new, found.verified, found.accepted


@pytest.mark.parametrize("way", WAYS)
def test_a_later_start_reads_what_the_first_one_packed(way, folder, cache, monkeypatch):
    first = loaded(folder, **WAYS[way])
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns, file.read_bytes()

    def refused():
        raise AssertionError("it is packed again")

    monkeypatch.setattr(packed_file, "computing", refused)
    second = loaded(folder, **WAYS[way])
    assert outcome(second) == outcome(first)
    assert second.runner.weight_bytes == first.runner.weight_bytes
    assert second.runner.draft_bytes == first.runner.draft_bytes
    assert file.read_bytes() == before[1]
    assert file.stat().st_mtime_ns > before[0]  # it was used last


def flipped(content):
    middle = len(content) * 3 // 4
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [flipped, lambda c: c[: len(c) // 2], lambda c: b"[1]" + c, lambda c: b""], ids=range(4)
)
def test_what_is_damaged_is_packed_again(damage, folder, cache, caplog):
    expected = outcome(loaded(folder, **WAYS["copy"]))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert outcome(loaded(folder, **WAYS["copy"])) == expected
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize("way", ["int4", "copy"])
def test_new_weights_are_packed(way, folder, tmp_path):
    other = write_model(tmp_path / "other", seed=5)
    expected = outcome(loaded(other, **WAYS[way]))
    loaded(folder, **WAYS[way])
    model = loaded(folder, **WAYS[way])
    model.runner.update(load_file(other / "model.safetensors"))
    assert outcome(model) == expected


def test_each_checkpoint_and_format_has_a_file_and_the_number_of_files_is_limited(folder, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(packed_file, "_MOST_FILES", 3)
    other = write_model(tmp_path / "other", seed=5)
    for model, way in ((folder, "int8"), (other, "int8"), (folder, "int4")):
        loaded(model, **WAYS[way])
    kept = set(cache.iterdir())
    assert len(kept) == 3
    loaded(folder, **WAYS["copy"])
    assert len(set(cache.iterdir()) & kept) == 2


def test_weights_that_pack_fast_are_not_kept(folder, cache, monkeypatch):
    monkeypatch.setattr(packed_file, "MIN_SECONDS", 100.0)
    loaded(folder, **WAYS["int8"])
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_keeps_nothing(folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert loaded(folder, **WAYS["int8"]) is not None
    assert "not kept" in caplog.text
