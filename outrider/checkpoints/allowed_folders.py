"""Folders from which a running target may load weights: those below its allowed roots, whatever path a caller names."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError

log = logging.getLogger(__name__)


class AllowedFolders:
    """Resolves paths that callers name. roots: real paths of folders; what lies below them may be loaded."""

    def __init__(self, model_path: str, folder: Path, roots: Sequence[str] = ()) -> None:
        """model_path: as the flags name the running model, whose folder is always allowed.

        roots: of --weight-update-roots; without any, the folders beside the model's own
        """
        self._model_path, self._folder = model_path, folder.resolve()
        chosen = [Path(root).expanduser() for root in roots] or _beside(self._folder)
        self._logged = ("", "")
        self.roots = tuple(root.resolve() for root in chosen)

    def find(self, path: str) -> Path:
        """The real path of a folder. Raises ConfigError with one message, whatever is wrong with the path.

        A caller must not learn what else lies on this machine, so the reason is only logged.
        """
        if path == self._model_path:
            return self._folder
        try:
            found = Path(path).expanduser().resolve(strict=True)
            reason = self._refusal(found)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error)
        if not reason:
            return found
        if (path, reason) != self._logged:  # a gateway repeats an attempt to restore weights
            self._logged = (path, reason)
            log.warning(
                "a weight update names the folder %r, which is not loaded: %s (allowed are folders below %s, see "
                "--weight-update-roots)",
                path[:1000], reason[:1000], ", ".join(map(str, self.roots)),
            )  # fmt: skip
        raise ConfigError(
            "`model_path` names no folder with a checkpoint that the target may load: it must be a folder on the "
            "target's machine below one of --weight-update-roots, by default beside the model's own; the target's log "
            "has the reason"
        )

    def _refusal(self, found: Path) -> str:
        """Why an existing path is not loaded; empty if it is."""
        if found != self._folder and not any(found.is_relative_to(root) for root in self.roots):
            return "it lies below no allowed folder"
        if not found.is_dir():
            return "it is no folder"
        if not os.access(found, os.R_OK | os.X_OK):
            return "it cannot be read"
        return "" if (found / "config.json").is_file() else "it has no config.json"


def _beside(folder: Path) -> list[Path]:
    """The folder's parent, where a trainer writes its checkpoints; not one where every user may write, such as /tmp."""
    parent = folder.parent
    try:
        shared = bool(parent.stat().st_mode & stat.S_IWOTH)
    except OSError:
        shared = True
    top = len(parent.parts) <= 1 or parent == Path.home().resolve()
    return [folder] if shared or top else [parent]
