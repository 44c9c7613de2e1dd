"""FR-Spec: a draft that proposes only frequent tokens, so that its head has fewer columns.

The map is a list of the target's token ids that `torch.save` wrote, or one in JSON, most frequent first; some lists
repeat an id. The draft's probabilities are normalized over the frequent tokens, and noise uses the target's ids. The
target does not see the map, so the text does not depend on it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.formats.base import DraftCheckpoint
from services.draft.model.params import Params
from services.draft.model.weights.torch_files import load_torch_file

OWN_MAP = "token_map.json"
"""A map of this name beside a draft's weights has the tokens that it learnt, and is read without a flag."""

_FLAG = "--speculative-token-map"


def read_token_map(path: str, vocab_size: int) -> NDArray[np.int32]:
    """Ids of the frequent tokens, without repetitions, in the file's order. Raises ConfigError.

    path: a local file, or REPOSITORY/FILE of the hub; vocab_size: entries of the head
    """
    file = Path(path).expanduser()
    if not file.is_file():
        file = _from_hub(path)
    content = _json_of(file) if file.suffix == ".json" else load_torch_file(file)
    ids = np.asarray(content) if isinstance(content, (list, tuple, np.ndarray)) else np.empty(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ConfigError(f"{_FLAG} {path} must hold a list of token ids, as torch.save writes it, or in JSON")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(
            f"{_FLAG} {path} names ids from {ids.min()} to {ids.max()}, but the head has {vocab_size} entries; "
            "it was made for another vocabulary"
        )
    _, first = np.unique(ids, return_index=True)
    unique: NDArray[np.int32] = ids[np.sort(first)].astype(np.int32)
    return unique


def _json_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from None


def with_token_map(draft: DraftCheckpoint, ids: NDArray[np.int32]) -> DraftCheckpoint:
    """The same draft with only these entries of the head."""

    def load(dtype: Any) -> Params:
        params = draft.load(dtype)
        head: jax.Array = params["head"]
        rows = jnp.asarray(ids)
        if "embed" not in params:  # tied: the head is the embedding of all tokens
            params = params | {"embed": head.T}
        return params | {"head": head[:, rows], "ids": rows}

    return replace(draft, config=replace(draft.config, vocab_size=len(ids)), load=load)


def _from_hub(path: str) -> Path:
    repository, _, name = path.rpartition("/")
    if path.startswith((".", "/", "~")) or repository.count("/") != 1:
        raise ConfigError(f"{_FLAG}: there is no file {path}; name a file, or one of a Hugging Face repository")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:
        raise ConfigError(f"cannot get {name} of {repository} from the Hugging Face hub: {error}") from error
