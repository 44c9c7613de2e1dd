"""GGUF files become folders in the published format: the same model, once, with progress to see, never half of one."""

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import gguf
import pytest
import safetensors.torch
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoTokenizer

from outrider.checkpoints import checkpoint, conversion
from outrider.checkpoints.checksums import CHECKSUMS
from outrider.checkpoints.gguf.record import read_record
from outrider.errors import ConfigError
from outrider.text.tokenizer import Tokenizer
from services.target.model.gguf import convert
from services.target.model.gguf import metadata as gguf_metadata
from services.target.model.gguf.progress import Phases
from tests.support.checkpoints.families import write_family
from tests.support.checkpoints.ggufs import write_gguf
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, greedy

WIDE = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.12}  # rows of whole blocks
GEMMA = {"num_hidden_layers": 7, "sliding_window_pattern": 6}  # the pattern is not in the file


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "kind", "changes"), [
    ("llama-2", Type.F32, {}), ("llama-2", Type.Q8_0, WIDE), ("llama-2", Type.Q4_0, WIDE), ("llama-2", Type.Q4_K, WIDE),
    ("llama-3.1", Type.F32, {}), ("qwen2.5", Type.F32, {}), ("qwen2.5", Type.Q4_K, WIDE), ("qwen3", Type.Q8_0, WIDE),
    ("gemma-3", Type.F32, GEMMA), ("gemma-3", Type.Q8_0, GEMMA | WIDE), ("phi-3", Type.F32, {}),
])  # fmt: skip
def test_the_same_model(family, kind, changes, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.checkpoints.families.FAMILIES", unsharded())
    rope = {}
    if family == "llama-3.1":  # waves of the published sizes
        rope = {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"}}  # fmt: skip
    write_gguf(
        tmp_path / "it.gguf", write_family(tmp_path / "original", family, **(changes | rope)), tmp_path / "plain", kind
    )
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    expected = safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    model = load_model(tmp_path / "out")
    assert run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1] == greedy(tmp_path / "plain")


def unsharded():
    from dataclasses import replace

    from tests.support.checkpoints.families import FAMILIES

    return {name: replace(family, shards=False) for name, family in FAMILIES.items()}


@pytest.fixture
def tiny_gguf(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", write_family(tmp_path / "original", "llama-2"), tmp_path / "plain")
    return tmp_path / "tiny.gguf"


def test_the_tokenizer_and_the_end_of_sequence_ids(tiny_gguf, tmp_path):
    assert convert.main([str(tiny_gguf), str(tmp_path / "out")]) == 0
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1  # others may read the weights too
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1]
    assert checkpoint.vocab_hash(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_templates_by_name_are_kept(tmp_path, monkeypatch):
    """As files of Command R and Hermes have them, of which llama.cpp takes "tool_use" where there are tools."""
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    add = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda writer, _: add(writer, templates))
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", "llama-2"), tmp_path / "plain")
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    paths = ("tokenizer.json", "tokenizer_config.json", *checkpoint.chat_template_files(tmp_path / "out"))
    tokenizer = Tokenizer({path: (tmp_path / "out" / path).read_bytes() for path in paths})
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.template.render(messages) == "plain"
    assert tokenizer.template.render(messages, tools=["one"]) == "one"


@pytest.mark.parametrize(("names", "ends"), [
    (["<end_of_turn>"], {1, 260}),  # Gemma, whose file states <eos>
    (["<|return|>", "<|call|>", "<|end|>"], {1, 260, 261}),  # gpt-oss, where <|end|> follows what it thinks
    (["<|endoftext|>", "<|end|>"], {1, 260, 261}),  # Phi-3
])  # fmt: skip
def test_end_of_turn_tokens_are_known_by_name(names, ends, tmp_path):
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", "llama-2"), tmp_path / "plain", ends=names)
    assert gguf_metadata.end_token_ids(GGUFReader(tmp_path / "it.gguf")) == ends
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    assert load_model(tmp_path / "out").eos_token_ids == tuple(sorted(ends))


@pytest.mark.parametrize(("pre", "stated", "begins", "whole"), [
    ("llama-bpe", None, True, True), ("llama-bpe", False, False, True), ("tekken", None, True, True),
    ("qwen2", None, False, False), ("qwen2", True, True, False), (None, None, False, False),
])  # fmt: skip
def test_texts_begin_and_words_stay_whole_as_in_llama_3(pre, stated, begins, whole, tmp_path):
    """Files of it do not say so; llama.cpp knows it by how texts are split. "lol" is a token that no merge makes."""
    folder = write_family(tmp_path / "original", "llama-2")
    write_gguf(tmp_path / "it.gguf", folder, tmp_path / "plain", ends=["lol"], pre=pre, begins=stated)
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    tokenizer = Tokenizer({file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()})
    found = tokenizer.encode("lol")
    assert (found[0] == 0, found[-1] == 260) == (begins, whole)


@pytest.mark.parametrize(("pre", "pieces"), [
    ("smollm", ["Hi", ",", "\n\n", "1", "2", "3", "4", ".", " Don", "'t"]),
    ("refact", ["Hi", ",", "\n\n", "1", "2", "3", "4", ".", " Don", "'t"]),
    ("stablelm2", ["Hi", ",\n\n", "1", "2", "3", "4", ".", " Don", "'t"]),
    ("glm4", ["Hi", ",\n\n", "123", "4", ".", " Don", "'t"]),
    ("seed-coder", ["Hi", ",", "\n\n", "1", "2", "3", "4", ".", " Don", "'t"]),
    ("deepseek-coder", ["Hi", ",", "\n", "\n", "1", "2", "3", "4", ".", " Don", "'", "t"]),
    ("falcon", ["Hi", ",", "\n", "\n", "123", "4", ".", " Don", "'", "t"]),
    ("gpt-2", ["Hi", ",", "\n", "\n", "1234", ".", " Don", "'t"]),
])  # fmt: skip
def test_texts_are_split_as_the_file_names_it(pre, pieces, tmp_path, capsys):
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", "llama-2"), tmp_path / "plain", pre=pre)
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    assert "warning" not in capsys.readouterr().err
    splitter = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).pre_tokenizer
    text = "Hi,\n\n1234. Don't"
    assert [text[slice(*span)] for _, span in splitter.pre_tokenize_str(text)] == pieces
    assert AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer.pre_tokenizer.pre_tokenize_str(
        text
    ) == splitter.pre_tokenize_str(text)


@pytest.mark.parametrize(("pre", "message"), [("runes", '"runes", which is not known'), (None, "does not say")])
def test_an_unknown_pretokenizer_is_warned_of(pre, message, tmp_path, capsys):
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", "llama-2"), tmp_path / "plain", pre=pre)
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 0
    assert message in capsys.readouterr().err


def test_tensors_that_would_not_be_read_are_refused(tmp_path, capsys):
    folder = write_family(tmp_path / "original", "llama-2", mlp_bias=True)
    write_gguf(tmp_path / "it.gguf", folder, tmp_path / "plain")
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "out")]) == 1
    assert "ffn_down.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path, capsys):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF?" * 10)
    assert convert.main([str(tmp_path / "bad.gguf"), str(tmp_path / "out")]) == 1
    assert "cannot be converted" in capsys.readouterr().err


def test_progress_is_shown_in_per_cent_of_tensors(tiny_gguf, tmp_path):
    message = io.StringIO()
    convert.convert(tiny_gguf, tmp_path / "out", Console(file=message, width=200))
    lines = message.getvalue().splitlines()
    assert [line for line in lines if "reading weights" in line and "%" in line]
    assert [line for line in lines if "loading weights" in line and "%" in line]
    for phase in ("reading weights", "loading weights", "writing weights", "building the tokenizer"):
        assert any(f"tiny.gguf: {phase}: done in" in line for line in lines), phase


def test_a_terminal_shows_bars():
    message = io.StringIO()
    with Phases("work", ("one", "two"), Console(file=message, force_terminal=True, width=100)) as phases:
        assert list(phases.track("one", [1, 2, 3, 4])) == [1, 2, 3, 4]
        phases.enter("two")
    assert "work: one" in message.getvalue()
    assert "100%" in message.getvalue()


def test_a_converted_file_is_found_in_a_read_only_folder(tiny_gguf, tmp_path, monkeypatch):
    """A mounted cache, or one of another user's, whose locks cannot be opened."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(tmp_path / "original", conversion.place_of(tiny_gguf))
    (folder.parent / f"{folder.name}.lock").mkdir()  # opening it fails for every user, root included
    assert checkpoint.resolve(str(tiny_gguf)) == folder
    folder.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="OUTRIDER_CACHE"):
        checkpoint.resolve(str(tiny_gguf))


@pytest.mark.long
def test_without_pytorch_another_process_s_conversion_is_awaited(tiny_gguf, tmp_path, monkeypatch):
    """As in a draft's container: another copy of the file, of another date, in a cache that both see."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "elsewhere" / tiny_gguf.name
    copy.parent.mkdir()
    copy.write_bytes(tiny_gguf.read_bytes())
    os.utime(copy, (1, 1))
    found: list[object] = []
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(conversion, "_POLL_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(conversion.importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
        patch.setattr(conversion, "_CONVERSION_SECONDS", 0.05)
        with pytest.raises(ConfigError, match="needs PyTorch, and no target service has converted it"):
            checkpoint.resolve(str(copy))
        patch.setattr(conversion, "_CONVERSION_SECONDS", 60.0)
        waiter = threading.Thread(target=lambda: found.append(checkpoint.resolve(str(copy))))
        waiter.start()
        code = f"from outrider.checkpoints import checkpoint; print(checkpoint.resolve({str(tiny_gguf)!r}))"
        folder = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        waiter.join(30)
    assert list(map(str, found)) == [folder]


def test_a_process_that_reads_the_file_itself_converts_it_for_one_that_waits(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(conversion.subprocess, "run", in_this_process)
    folder = conversion.place_of(tiny_gguf)
    conversion.convert_when_asked(tiny_gguf)
    time.sleep(0.05)
    assert not folder.exists()  # nothing is converted that nothing waits for
    conversion._await(tiny_gguf, folder)
    assert (folder / "model.safetensors").is_file()
    assert not list(folder.parent.glob("*.wanted"))


def test_a_file_is_converted_once_and_a_conversion_that_is_killed_leaves_nothing_half(tiny_gguf, tmp_path, monkeypatch):
    """Its folder gets its name when it is whole; what remains of one that was killed is swept up by the next."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    code = f"from outrider.checkpoints import checkpoint; checkpoint.resolve({str(tiny_gguf)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    models = tmp_path / "cache" / "models"
    deadline = time.monotonic() + 60
    while not list(models.glob("*.partial/model.safetensors")):  # in the midst of its work
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [path.suffix for path in models.iterdir() if path.is_dir()] == [".partial"]
    folder = checkpoint.resolve(str(tiny_gguf))
    assert [path for path in models.iterdir() if path.is_dir()] == [folder]
    assert (folder / "generation_config.json").is_file()
    before = os.stat(folder / "model.safetensors").st_mtime_ns
    assert checkpoint.resolve(str(tiny_gguf), whole=True) == folder
    assert os.stat(folder / "model.safetensors").st_mtime_ns == before
    assert {*json.loads((folder / CHECKSUMS).read_text())} == {path.name for path in folder.iterdir()} - {CHECKSUMS}


def test_a_full_disk_is_named_as_such(tiny_gguf, tmp_path, monkeypatch):
    """And not as a fault of the file: by the converter's exit code, and by the message that follows from it."""
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(convert, "convert", lambda *_: (_ for _ in ()).throw(error))
    code = convert.main([str(tiny_gguf), str(tmp_path / "out")])
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
    with pytest.raises(ConfigError, match=r"the disk of the cache .*/models is full.*OUTRIDER_CACHE"):
        checkpoint.resolve(str(tiny_gguf))


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF?" * 10)
    with pytest.raises(ConfigError, match="could not be converted"):
        checkpoint.resolve(str(tmp_path / "bad.gguf"))
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_a_description_is_a_conversion_without_weights(tiny_gguf, tmp_path):
    assert convert.main([str(tiny_gguf), str(tmp_path / "full")]) == 0
    assert convert.main([str(tiny_gguf), str(tmp_path / "described"), "--describe"]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "described").iterdir()}
    record = json.loads(files.pop("gguf.json"))
    assert record["file"] == str(tiny_gguf)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "full").iterdir()}
    assert whole.pop("model.safetensors")
    assert files.pop("chat_template.jinja") == whole.pop("chat_template.jinja")
    found, expected = (
        {name: {key: value for key, value in json.loads(content).items() if key != "transformers_version"}
         for name, content in some.items()}
        for some in (files, whole)
    )  # fmt: skip
    assert found == expected
    names = {tensor.name: tensor for tensor in GGUFReader(tiny_gguf).tensors}
    found = read_record(tmp_path / "described").tensors
    assert found.keys() == names.keys()
    for name, tensor in found.items():
        assert (tensor.start, tensor.bytes) == (names[name].data_offset, names[name].n_bytes)
        assert tensor.shape == tuple(reversed(names[name].shape.tolist()))


def in_this_process(command, **_):
    arguments = command[command.index(conversion._CONVERTER) + 1 :]
    return subprocess.CompletedProcess(command, convert.main(arguments))


def test_descriptions_are_of_one_file_and_conversions_of_what_is_in_it(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion.subprocess, "run", in_this_process)
    folder = checkpoint.resolve(str(tiny_gguf), description=True)
    assert checkpoint.resolve(str(tiny_gguf), description=True) == folder == checkpoint.local_folder(str(tiny_gguf))
    copy = shutil.copy(tiny_gguf, tmp_path / "copy.gguf")
    other = checkpoint.resolve(str(copy), description=True)
    assert read_record(other).file == tmp_path / "copy.gguf"
    converted = checkpoint.resolve(str(copy))
    assert {checkpoint.fingerprint(one) for one in (folder, other, converted)} == {checkpoint.fingerprint(folder)}
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"has .* bytes instead of"):
        read_record(folder).check()
    with pytest.raises(ConfigError, match="could not be converted"):  # another file by now, which ends too early
        checkpoint.resolve(str(tiny_gguf), description=True)
