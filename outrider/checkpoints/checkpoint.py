"""The folder of a model, from a Hugging Face id, a local folder, a GGUF file or the default model.

The folder holds config.json, safetensors weights (sharded or not) and, for a target, tokenizer.json. GGUF files are
converted once into a cache (`conversion.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from outrider.checkpoints import disk
from outrider.checkpoints.checksums import sample
from outrider.checkpoints.conversion import (
    converted,
    default_gguf,
    described,
    description_place,
    origin_of,
    place_of,
)
from outrider.checkpoints.headers import header_bytes
from outrider.config import DEFAULT_MODEL, LoadFormat
from outrider.errors import ConfigError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_TORCH_FILES = ["pytorch_model*.bin"]
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
_TEMPLATES = "additional_chat_templates/*.jinja"
_DUPLICATES = "consolidated*.safetensors"  # the same weights in Mistral's own layout
_VOCABULARY = "vocabulary.json"
HUB_DUPLICATES = ["*/*.safetensors", _DUPLICATES]


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Turn the system's errors about unreadable files into ConfigError."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename} cannot be read: {error.strerror}"
        if isinstance(error, PermissionError):
            reason += f"; this process runs as user {os.geteuid()}, who needs read access to the file and its folders"
        raise ConfigError(reason) from None


@_readable()
def resolve(
    model_path: str,
    revision: str | None = None,
    *,
    torch_files: bool = False,
    safetensors: bool = True,
    weights: bool = True,
    whole: bool = False,
    description: bool = False,
) -> Path:
    """The folder of a model, downloaded and converted if necessary.

    model_path: "default", a local folder, a GGUF file, or a Hugging Face id, which a revision may follow:
    REPOSITORY@REVISION. torch_files, safetensors: as of `weight_files`. weights: False for a model without weights.
    whole: as of `converted`. description: of a GGUF file only what describes it, as of `described`, for a caller that
    reads the weights from the file or needs none. Raises ConfigError, with the missing part.
    """
    kinds = _Kinds(torch_files, safetensors, weights)
    if (gguf := gguf_file(model_path)) is not None:
        if not gguf.is_file():
            raise ConfigError(f"there is no file {gguf}")
        return _checked(described(gguf), _NONE) if description else _checked(converted(gguf, whole=whole))
    path = Path(model_path).expanduser()
    if path.is_dir():
        return _checked(path, kinds)
    repository, revision = split_revision(model_path, revision)
    if path.is_absolute() or model_path.startswith(("./", "../", "~")) or repository.count("/") != 1:
        raise ConfigError(f"there is no folder {path}; name a folder, a GGUF file or a Hugging Face id")
    return _checked(_from_hub(repository, revision, kinds), kinds)


def resolve_draft(model_path: str, revision: str | None, load_format: LoadFormat, *, whole: bool = False) -> Path:
    """The folder of a draft model, as of `resolve`. load_format: --speculative-draft-load-format"""
    return resolve(
        model_path,
        revision,
        torch_files=load_format != "safetensors",
        safetensors=load_format != "pt",
        weights=load_format != "dummy",
        whole=whole,
    )


def split_revision(model_path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Repository and revision of REPOSITORY@REVISION. Raises ConfigError if `revision` is another one."""
    repository, _, own = model_path.partition("@")
    if own and revision not in (None, own):
        raise ConfigError(f"{model_path} names another revision than {revision}; leave one of them out")
    return repository, own or revision


def gguf_file(model_path: str) -> Path | None:
    """The GGUF file that a model's path names, which need not exist; None for other models."""
    path = default_gguf() if model_path == DEFAULT_MODEL else Path(model_path).expanduser()
    return path if path.suffix == ".gguf" else None


def local_folder(model_path: str) -> Path | None:
    """The folder of a model if it lies on this machine already; None otherwise. Downloads and converts nothing.

    Of a GGUF file that is not converted, the folder that describes it.
    """
    if (gguf := gguf_file(model_path)) is not None:
        places = (place_of(gguf), description_place(gguf)) if gguf.is_file() else ()
        return next((folder for folder in places if folder.is_dir()), None)
    path = Path(model_path).expanduser()
    if path.is_dir() or path.is_absolute() or model_path.count("/") != 1:
        return path if path.is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_path, local_files_only=True))
    except Exception:  # the library's errors for a missing repository and for names that are none
        return None


def display_name(model_path: str) -> str:
    """The default name of a served model, without a revision."""
    if model_path == DEFAULT_MODEL:
        return DEFAULT_MODEL_NAME
    return model_path if Path(model_path).expanduser().exists() else split_revision(model_path)[0]


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no JSON object")
    return content


def weight_files(folder: Path, *, torch_files: bool = False, safetensors: bool = True) -> list[Path]:
    """The weight files of a model's folder. Raises ConfigError.

    With an index, the files that it names; but only model.safetensors, as in `transformers`, if that file exists and
    the index does not name it. Without an index, all files except those in Mistral's own layout.

    torch_files: accept files of `torch.save` if there are no safetensors files. safetensors: accept these
    """
    kinds = ({"model.safetensors": "*.safetensors"} if safetensors else {}) | (
        {"pytorch_model.bin": "pytorch_model*.bin"} if torch_files else {}
    )
    for name, pattern in kinds.items():
        whole, index = folder / name, folder / f"{name}.index.json"
        if index.is_file():
            files = _indexed(index)
            if whole.is_file() and whole not in files:
                return [whole]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ConfigError(f"{folder} lacks weight files that its index names: {', '.join(missing)}")
            return files
        if files := sorted(file for file in folder.glob(pattern) if not file.match(_DUPLICATES)):
            return files
    remedy = "" if torch_files else "; if it has pytorch_model.bin, save the model again as safetensors"
    raise ConfigError(f"{folder} has no weights; expected {' or '.join(kinds)}, or an index of its parts{remedy}")


def _indexed(index: Path) -> list[Path]:
    places = load_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index} names no weight files; download it again")
    names = sorted(set(places.values()))
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ConfigError(f"{index} names a file outside of its folder: {outside[0]}; weights lie below the folder")
    return [index.parent / name for name in names]


def chat_template_files(folder: Path) -> list[str]:
    """Paths of the chat templates in a model's folder, relative to it, without those inside tokenizer_config.json."""
    names = [name for name in ("chat_template.jinja", "chat_template.json") if (folder / name).is_file()]
    return names + sorted(file.relative_to(folder).as_posix() for file in folder.glob(_TEMPLATES) if file.is_file())


def fingerprint(folder: Path) -> str:
    """Hash of configuration, weight headers and samples of the weights: equal for equal checkpoints, different after
    training, and cheap for large files. Folders that were made from a GGUF file have the file's.
    """
    if (origin := origin_of(folder)) is not None:
        return hashlib.sha256(origin.encode()).hexdigest()[:16]
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder, torch_files=True):
        length = file.stat().st_size
        with file.open("rb") as stream:
            size = header_bytes(stream, file) if file.suffix == ".safetensors" else 0
            digest.update(stream.read(size))
            sample(digest, stream, 8 + size, length)
    return digest.hexdigest()[:16]


def vocab_hash(folder: Path) -> str:
    """Hash of the tokenizer's vocabulary; empty if the folder has no tokenizer.json."""
    if (stored := stored_vocabulary(folder)) is not None:
        return stored.hash
    entries = vocabulary(folder)
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()[:16] if entries else ""


@dataclass(frozen=True)
class StoredVocabulary:
    """What a start needs of a vocabulary, without parsing it. hash: as of vocab_hash.

    largest: greatest id of a token that is not an added one; special: ids of the special tokens
    """

    hash: str
    largest: int
    special: Mapping[str, int]


def stored_vocabulary(folder: Path) -> StoredVocabulary | None:
    """What `write_vocabulary` has written; None for other folders, and if the tokenizer is another by now."""
    file = folder / _VOCABULARY
    if origin_of(folder) is None or not file.is_file():
        return None
    facts = load_json(file)
    if facts.pop("tokenizer_bytes", None) != (folder / "tokenizer.json").stat().st_size:
        return None
    try:
        return StoredVocabulary(**facts)
    except TypeError:  # of another release
        return None


def write_vocabulary(folder: Path) -> None:
    """Write down what starts need of the vocabulary of a folder that is made from a GGUF file, if it has one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    added = {entry["content"]: entry for entry in load_json(file).get("added_tokens", [])}
    facts = {
        "hash": vocab_hash(folder), "tokenizer_bytes": file.stat().st_size,
        "largest": max((i for token, i in vocabulary(folder).items() if token not in added), default=-1),
        "special": {token: entry["id"] for token, entry in added.items() if entry.get("special")},
    }  # fmt: skip
    (folder / _VOCABULARY).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def vocabulary(folder: Path) -> Mapping[str, int]:
    """Token ids by token, added tokens included; empty if the folder has no tokenizer.json.

    The last one is remembered, because parsing a large file takes most of a second, and a start needs it several times.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    status = file.stat()
    return _vocabulary(file, (status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=1)
def _vocabulary(file: Path, _state: tuple[int, int]) -> Mapping[str, int]:
    content = load_json(file)
    try:
        vocab = content["model"].get("vocab", {})
        pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        found = dict(pairs) | {entry["content"]: int(entry["id"]) for entry in content.get("added_tokens", [])}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{file} is no tokenizer's: {error!r:.200}; download it again") from None
    return MappingProxyType(found)


class _Kinds(NamedTuple):
    """Which weight files of a model are read. Fields as the arguments of `resolve`."""

    torch_files: bool = False
    safetensors: bool = True
    weights: bool = True

    def files(self, folder: Path) -> list[Path]:
        """The weight files of a folder. Raises ConfigError."""
        if not self.weights:
            return []
        return weight_files(folder, torch_files=self.torch_files, safetensors=self.safetensors)


_SAFETENSORS = _Kinds()
_NONE = _Kinds(weights=False)


def _checked(folder: Path, kinds: _Kinds = _SAFETENSORS) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is no model")
    for file in {*kinds.files(folder), *folder.glob("*.json")}:
        if file.exists():
            file.open("rb").close()  # libraries report unreadable files in various ways, some as missing
    return folder


def _from_hub(repository: str, revision: str | None, kinds: _Kinds) -> Path:
    from huggingface_hub import snapshot_download

    tensors = kinds.weights and kinds.safetensors
    ignored = HUB_DUPLICATES if tensors else ["*.safetensors"]
    try:
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=ignored)
        )
        found = tensors and any(not file.match(_DUPLICATES) for file in folder.glob("*.safetensors"))
        if kinds.torch_files and kinds.weights and not found:
            snapshot_download(repository, revision=revision, allow_patterns=_TORCH_FILES)
        return folder
    except Exception as error:
        if disk.is_full(error):
            raise ConfigError(
                f"the disk of the Hugging Face cache is full, so {repository} cannot be fetched; free some of it, or "
                "set HF_HOME to a folder on another disk"
            ) from error
        raise ConfigError(f"cannot get {repository} from the Hugging Face hub: {error}") from error
