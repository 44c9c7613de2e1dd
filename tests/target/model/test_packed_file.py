"""Packed weights are kept for the next start: it maps the same numbers, and packs anew what is damaged."""

import itertools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from outrider.checkpoints.gguf.record import read_record
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.engine import memory
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices import packed_file
from services.target.model import program_builder
from services.target.model.dense.load import load_dense
from services.target.model.gguf import convert
from services.target.model.loading.load import load
from tests.support.checkpoints.families import write_family
from tests.support.checkpoints.ggufs import write_gguf
from tests.support.checkpoints.quantizers import FP8, fp8, write_quantized
from tests.support.target.driving import engine_of, opening, run
from tests.support.target.self_speculation import drafting
from tests.support.tiny import write_model

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")

WAYS = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "copy": {"self_speculation": "quantized", "dtype": "bfloat16"},  # with a pruned head
    "gguf": {"dtype": "auto"},  # the file's own formats
    "fp8": {"dtype": "auto"},
}


class Checkpoint(NamedTuple):
    """A folder, the description of a GGUF file, and a folder of 8-bit floats."""

    folder: Path
    described: Path
    fp8: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    wide = write_family(made / "wide", "llama-2", hidden_size=256, intermediate_size=512, initializer_range=0.12)
    write_gguf(made / "it.gguf", wide, made / "plain", lambda name: Type.Q6_K if "v_proj" in name else
               Type.Q4_K if "_proj" in name or "embed" in name else Type.F32)  # fmt: skip
    assert convert.main([str(made / "it.gguf"), str(made / "described"), "--describe"]) == 0
    write_quantized(wide, made / "wide as plain", fp8(128), FP8 | {"weight_block_size": [128, 128]})
    return Checkpoint(write_model(made / "plain llama"), made / "described", wide)


@pytest.fixture
def folder(both):
    return both.folder


def folder_for(way, both):
    return {"gguf": both.described, "fp8": both.fp8}.get(way, both.folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(program_builder, "MIN_PRUNED_OUTPUTS", 8)
    return tmp_path / "cache" / "packed"


def loaded(folder, **flags):
    """A model, whose packed weights are on the disk by now."""
    config = TargetConfig(**({"device": "cpu", "dtype": "float32"} | flags))
    model = load_dense(folder, config) or load(folder, config)
    packed_file.write_pending()
    return model


def outcome(model):
    """Two texts, and how many draft tokens of a copy were right."""
    engine = (drafting if model.copied else engine_of)(model)
    found = run(engine, [opening(1, [5, 6, 7]), opening(2, list(range(3, 40)))])
    return found.new, found.verified, found.accepted


@pytest.mark.parametrize("way", WAYS)
def test_a_later_start_maps_what_the_first_one_packed(way, both, cache, monkeypatch):
    folder = folder_for(way, both)
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
    if way == "gguf":
        assert first.mapped_bytes == 0
        assert second.mapped_bytes >= second.runner.weight_bytes - 10_000  # all but the norms
        monkeypatch.setattr(memory, "free_host_memory", lambda: second.mapped_bytes)
        assert memory.plan_memory(first, TargetConfig()).pages > 0
        with pytest.raises(ConfigError, match="page of"):  # it would displace the mapped pages, which count as free
            memory.plan_memory(second, TargetConfig())
        sizes = mapping_of(file)
        assert sizes["Rss"] > 0
        assert sizes["Anonymous"] == 0  # no page was changed: its pages are those of every process that maps it


def mapping_of(file):
    """Sizes of a mapped file in this process, in kB, by name."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.endswith(str(file)))
    words = (line.split() for line in lines[begin + 1 :])
    return {word[0].rstrip(":"): int(word[1]) for word in itertools.takewhile(lambda word: word[0][-1] == ":", words)
            if word[-1] == "kB"}  # fmt: skip


def flipped(content):
    middle = len(content) * 3 // 4
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [flipped, lambda c: c[: len(c) // 2], lambda c: b"[1]" + c, lambda c: b""], ids=range(4)
)
@pytest.mark.parametrize("way", ["copy", "gguf"])
def test_what_is_damaged_is_packed_again(way, damage, both, cache, caplog):
    folder = folder_for(way, both)
    expected = outcome(loaded(folder, **WAYS[way]))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert outcome(loaded(folder, **WAYS[way])) == expected
    assert f"{file} is damaged" in caplog.text
    assert file.read_bytes() == whole


@pytest.mark.parametrize("way", ["int4", "copy"])
def test_new_weights_are_packed(way, folder, tmp_path):
    other = write_model(tmp_path / "other", seed=5)
    expected = outcome(loaded(other, **WAYS[way]))
    loaded(folder, **WAYS[way])
    model = loaded(folder, **WAYS[way])
    model.runner.update(load_file(other / "model.safetensors"))
    assert outcome(model) == expected


def test_weights_that_are_replaced_are_not_written(folder, tmp_path, cache):
    other = write_model(tmp_path / "other", seed=5)
    model = load_dense(folder, TargetConfig(device="cpu", dtype="float32", quantization="int4"))
    model.runner.update(load_file(other / "model.safetensors"))
    packed_file.write_pending()
    assert not list(cache.glob("*"))


def test_a_gguf_file_that_changes_is_packed_again(both, cache):
    loaded(both.described, **WAYS["gguf"])
    os.utime(read_record(both.described).file)
    loaded(both.described, **WAYS["gguf"])
    assert len(list(cache.iterdir())) == 2


def test_a_change_of_any_word_changes_the_checksum():
    numbers = np.random.default_rng(0).integers(0, 256, 203, np.uint8)

    def checksum():
        return library.load().outrider_checksum(numbers.ctypes.data, numbers.nbytes)

    before = checksum()
    for place in range(len(numbers)):
        numbers[place] ^= 16
        assert checksum() != before
        numbers[place] ^= 16
    assert checksum() == before
    assert library.load().outrider_checksum(numbers.ctypes.data, numbers.nbytes - 1) != before


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
