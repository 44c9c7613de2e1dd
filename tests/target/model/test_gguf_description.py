"""Descriptions of GGUF files that are made without `transformers` equal those that it makes."""

import hashlib
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from outrider.checkpoints import checkpoint
from outrider.checkpoints.conversion import default_gguf
from outrider.errors import ConfigError
from services.target.model.gguf import convert, direct
from services.target.model.gguf.reader import HeaderReader
from services.target.model.loading import support
from tests.support.checkpoints.families import FAMILIES, write_family
from tests.support.checkpoints.ggufs import write_gguf
from tests.support.tiny import VOCAB

ENDS = ["<|endoftext|>", "<|im_end|>"]  # transformers adds the first one to vocabularies without it
LLAMA_3 = {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 8192, "rope_type": "llama3"}}  # fmt: skip
TOKENIZER_OF_THE_DEFAULT_MODEL = "194b2f4039e3d5aca06af85d45d9fdb49cd6c27b608df8429a3614d46262bc55"
"""Of tokenizer.json as transformers 5.24 makes it: SHA-256 of its content, keys in order."""


def contents(folder):
    """What the files hold, without what says which library wrote them."""
    found = {}
    for file in sorted(folder.iterdir()):
        text = file.read_text()
        found[file.name] = json.loads(text) if file.suffix == ".json" else text
    for name in ("config.json", "generation_config.json"):
        found[name].pop("transformers_version", None)
    for setting in ("add_prefix_space", "local_files_only"):  # null for Qwen, and as transformers was called
        found["tokenizer_config.json"].pop(setting, None)
    return found


def refuse(*_):
    raise direct.Unknown("its tokenizer is another")


@pytest.fixture(autouse=True)
def unsharded(monkeypatch):
    whole = {name: replace(family, shards=False) for name, family in FAMILIES.items()}
    monkeypatch.setattr("tests.support.checkpoints.families.FAMILIES", whole)


@pytest.mark.parametrize(("family", "changes", "options"), [
    ("llama-2", {}, {"pre": "smollm", "begins": False}), ("llama-3.1", LLAMA_3, {"pre": "llama-bpe"}),
    ("llama-2", {"tie_word_embeddings": True}, {"pre": "gpt-2", "begins": True, "scaling": ("linear", 2.0)}),
    ("llama-2", {}, {"pieces": True}), ("llama-2", {}, {"pieces": True, "begins": False}),
    ("llama-2", {}, {"pieces": True, "begins": True}),
    ("qwen2.5", {}, {"pre": "qwen2"}), ("qwen3", {}, {"pre": "deepseek-r1-qwen", "begins": True}),
    ("qwen3", {"head_dim": 32}, {"pre": "glm4"}), ("qwen2.5", {}, {}),
])  # fmt: skip
def test_a_description_is_that_of_transformers(family, changes, options, tmp_path, monkeypatch):
    file = tmp_path / "it.gguf"
    write_gguf(file, write_family(tmp_path / "original", family, **changes), tmp_path / "plain", ends=ENDS, **options)
    with monkeypatch.context() as patch:
        patch.setattr(direct, "write_tokenizer", refuse)
        convert._describe_by_transformers(file, tmp_path / "theirs", Console(file=io.StringIO()))
    warning = direct.describe(HeaderReader(file), tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert bool(warning) == (not options)


@pytest.mark.parametrize(("family", "options", "reason"), [
    ("gemma-3", {}, "architecture is gemma3"), ("llama-2", {"pre": "tekken"}, "split in another way"),
])  # fmt: skip
def test_other_files_are_described_by_transformers(family, options, reason, tmp_path, capsys):
    file = tmp_path / "it.gguf"
    write_gguf(file, write_family(tmp_path / "original", family), tmp_path / "plain", **options)
    assert convert.main([str(file), str(tmp_path / "out"), "--describe"]) == 0
    assert reason in capsys.readouterr().err
    assert {"config.json", "gguf.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("flags", [["--describe"], []])
def test_what_starts_need_of_a_vocabulary_is_written_down(flags, tmp_path, monkeypatch):
    file, folder = tmp_path / "it.gguf", tmp_path / "out"
    write_gguf(file, write_family(tmp_path / "original", "qwen2.5"), tmp_path / "plain", pre="qwen2")
    assert convert.main([str(file), str(folder), *flags]) == 0
    monkeypatch.setattr(checkpoint, "origin_of", lambda _: "file")  # as of a folder in the cache
    stored = checkpoint.stored_vocabulary(folder)
    assert stored.special["<|finish|>"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_vocabulary", None)  # which parses the tokenizer
        found = checkpoint.vocab_hash(folder), support.tokenizer_eos(folder)
        support.check_vocabulary(folder, VOCAB)
    with pytest.raises(ConfigError, match="past the model's vocabulary"):
        support.check_vocabulary(folder, stored.largest)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert checkpoint.stored_vocabulary(folder) is None  # it is of another tokenizer
    assert (checkpoint.vocab_hash(folder), support.tokenizer_eos(folder)) == found


def test_the_default_model_s_tokenizer_is_that_of_transformers(tmp_path):
    assert direct.describe(HeaderReader(default_gguf()), tmp_path / "out") is None
    content = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    found = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert found == TOKENIZER_OF_THE_DEFAULT_MODEL


def test_a_description_needs_neither_pytorch_nor_transformers(tmp_path):
    file, folder = tmp_path / "it.gguf", tmp_path / "out"
    write_gguf(file, write_family(tmp_path / "original", "llama-2"), tmp_path / "plain")
    code = (
        "import sys; from services.target.model.gguf import convert; "
        f"assert convert.main([{str(file)!r}, {str(folder)!r}, '--describe']) == 0; "
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert (folder / "gguf.json").is_file()
