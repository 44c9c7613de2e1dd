"""FR-Spec: a draft that proposes frequent tokens alone, whose head is as many rows of the whole one.

The map is what `torch.save` made of a list of ids of the target, most frequent first; some lists name an id twice. The
draft's probabilities are those among the frequent tokens; noise belongs to the target's ids; the target knows nothing
of it, so no text depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.formats.base import Draft
from services.draft.model.layers.heads import Params
from services.draft.model.weights.torch_files import load_torch_file

_FLAG = "--speculative-token-map"


def read_token_map(path: str, vocab_size: int) -> NDArray[np.int32]:
    """Ids of the frequent tokens, each once, in the file's order. path: a local file, or REPOSITORY/FILE of the hub.

    vocab_size: ids that the head has. Raises ConfigError.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        file = _from_hub(path)
    content = load_torch_file(file)
    ids = np.asarray(content) if isinstance(content, (list, tuple, np.ndarray)) else np.empty(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ConfigError(f"{_FLAG} {path} must hold a list of token ids, as torch.save writes it")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ConfigError(
            f"{_FLAG} {path} names ids from {ids.min()} to {ids.max()}, but the head has {vocab_size} entries; "
            "it was made for another vocabulary"
        )
    _, first = np.unique(ids, return_index=True)
    return ids[np.sort(first)].astype(np.int32)


def with_token_map(draft: Draft, ids: NDArray[np.int32]) -> Draft:
    """The same draft with the head's entries for these ids alone."""

    def load(dtype: Any) -> Params:
        params = draft.load(dtype)
        head: jax.Array = params["head"]
        rows = jnp.asarray(ids)
        if "embed" not in params:  # the embedding of all tokens is the head itself
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
