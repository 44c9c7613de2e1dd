"""Sampling on the device: outrider.speculation.sampling for many rows at once, in PyTorch.

It gives the tokens of the NumPy oracle with less work. Gumbel noise is computed in float32 for every token, which
selects a few candidates; only these are compared in float64. Filters sort only the most probable tokens. Greedy rows
and rows without filters skip the work of the other rows. On CPUs a compiled kernel gives the same tokens
(kernels/cpu/sampling.py); this module is its plain twin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from outrider.speculation import noise
from services.target.sampling import masks, penalties
from services.target.sampling.penalties import Adjustments
from services.target.sampling.row_params import RowParams
from services.target.step.token_mask import TokenMask

# Candidates by approximate score, whose error is below 0.3: the probability that this many tokens are within
# that of the best one is below 1e-20.
_CANDIDATES = 32
# Tokens sorted at first for top_p without top_k; if they do not cover the nucleus, all tokens are sorted.
_ORDERED = 1024
# Parts of a row that a GPU reduces in parallel. Most vocabulary sizes are multiples.
_PARTS = 64
UNRESOLVED = -2
"""Stands for a token that `sample_adjusted` could not determine without waiting for the device."""
_LOW16, _LOW17, _LOW32 = 0xFFFF, 0x1FFFF, 0xFFFFFFFF


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def _mix(x: Tensor) -> Tensor:
    """The mixer of outrider.speculation.noise. int32 stands for uint32: products wrap alike, shifts are masked."""
    x = x ^ ((x >> 16) & _LOW16)
    x = x * _signed(noise.MIX_A)
    x = x ^ ((x >> 15) & _LOW17)
    x = x * _signed(noise.MIX_B)
    return x ^ ((x >> 16) & _LOW16)


def _bits32(keys: Tensor, tokens: Tensor) -> Tensor:
    """Random bits as int32. keys: [..., 2] int64 words; tokens: int64, broadcasts against keys[..., 0]."""
    keys = keys.to(torch.int32)
    x = _mix((tokens.to(torch.int32) * _signed(noise.TOKEN_STEP)) ^ keys[..., 0])
    return _mix(x ^ keys[..., 1])


def token_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Random bits of tokens, equal to outrider.speculation.noise.token_bits.

    keys: [n, 2] int64, words in [0, 2^32); tokens: [v] int64. Returns [n, v] int64 in [0, 2^32).
    """
    return _bits32(keys[:, None, :], tokens).to(torch.int64) & _LOW32


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of bits (int32), as in the oracle: computed in float64, rounded to float32, returned as float64."""
    u = ((bits.to(torch.int64) & _LOW32).to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(u))).to(torch.float32).to(torch.float64)


def rough_gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of bits (int32) in float32; the error is at most 0.3, for the smallest values; mostly 1e-5."""
    # Computed from 1 - u, because float32 is precise near 0, where the large noise is. ~bits is 2^32 - 1 - bits.
    rest = ((~bits).to(torch.float32) + 0.5) * 2.0**-32
    rest = torch.where(rest < 0, rest + 1.0, rest)
    return -torch.log(-torch.log1p(-rest).clamp(min=-noise.GUMBEL_MAX))


def sample(
    logits: Tensor, rows: RowParams, adjustments: Adjustments | None = None, mask: TokenMask | None = None
) -> Tensor:
    """Sample a token after each row. logits: [R, V], any float dtype. Returns [R] int64; -1 for non-finite logits."""
    return sample_adjusted(adjusted(logits, (rows.banned_rows, rows.banned_tokens), adjustments, mask), rows)


def adjusted(
    logits: Tensor,
    banned: tuple[Tensor, Tensor] | None,
    adjustments: Adjustments | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """Logits after penalties, bias, grammar and bans: [R, V] float32, or the same tensor if there is nothing to apply.

    logits: [R, V], not changed; banned: rows and tokens, [B] int64 each, pairs that cannot be sampled
    """
    if adjustments is not None or mask is not None or (banned is not None and len(banned[0])):
        logits = logits.to(torch.float32, copy=True)
        if adjustments is not None:
            penalties.apply(logits, adjustments)
        if mask is not None:
            masks.apply(logits, mask)
        if banned is not None:
            logits.index_put_(banned, logits.new_full((), -torch.inf))
    return logits


def sample_adjusted(logits: Tensor, rows: RowParams, *, wait: bool = True) -> Tensor:
    """Sample a token after each row, given adjusted logits. Returns [R] int64; -1 for non-finite logits.

    wait: wait for the device to learn whether the sorted tokens cover the nucleus. Otherwise rows that they do not
    cover get UNRESOLVED, and must be sampled again with wait.
    """
    if rows.all_greedy and (greedy := _greedy(logits.device)) is not None:
        return greedy(logits)
    logits = logits.float()
    best, argmax = likeliest(logits, 1 if logits.device.type == "cpu" else _PARTS)
    tokens = argmax
    if not rows.all_greedy:
        tokens = torch.where(rows.greedy, argmax, _sample_noisy(logits, best, rows, wait))
    return torch.where(best.isfinite(), tokens, -1)


@lru_cache
def _greedy(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The device's kernel for greedy rows, if it has one."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from services.target.kernels.cuda.greedy import greedy

    return greedy


def likeliest(logits: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and the first token that has it, [R] each. logits: [R, V].

    parts: parts of a row that the device reduces in parallel, if they have equal sizes
    """
    if parts == 1 or logits.shape[1] % parts:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    bests, places = logits.unflatten(1, (parts, -1)).max(dim=-1)
    best, part = bests.max(dim=-1)
    return best, part * (logits.shape[1] // parts) + places.gather(1, part[:, None])[:, 0]


def probabilities(logits: Tensor, rows: RowParams, parents: Tensor, tokens: Tensor) -> Tensor:
    """Probabilities of tokens after rows that are not greedy, given adjusted logits.

    parents, tokens: [n] int64, rows and token ids. Returns [n] float32.
    """
    logits = logits.float()
    if rows.any_filter:
        logits = logits.masked_fill(~_kept(logits, logits.max(dim=-1).values, rows)[0], -torch.inf)
    scaled = logits / rows.temperature.float()[:, None]
    return (scaled[parents, tokens] - scaled.logsumexp(dim=-1)[parents]).exp()


def _sample_noisy(logits: Tensor, best: Tensor, rows: RowParams, wait: bool) -> Tensor:
    """argmax(log p + noise). log p is needed up to a constant a row, so it is not normalised. Returns [R] int64."""
    unresolved = None
    if rows.any_filter:
        kept, unresolved = _kept(logits, best, rows, wait)
        logits = logits.masked_fill(~kept, -torch.inf)
    ids = torch.arange(logits.shape[1], device=logits.device)
    rough = (logits - best[:, None]) / rows.temperature.float()[:, None]
    rough += rough_gumbel(_bits32(rows.keys[:, None, :], ids))
    _, candidates = rough.topk(min(_CANDIDATES, logits.shape[1]), dim=-1, sorted=False)
    candidates, _ = candidates.sort(dim=-1)  # so that argmax prefers the lowest id of equal scores
    scores = (logits.gather(1, candidates).double() - best[:, None].double()) / rows.temperature[:, None]
    scores += gumbel(_bits32(rows.keys[:, None, :], candidates))
    tokens = candidates.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    return tokens if unresolved is None else torch.where(unresolved, UNRESOLVED, tokens)


def _kept(logits: Tensor, best: Tensor, rows: RowParams, wait: bool = True) -> tuple[Tensor, Tensor | None]:
    """Tokens that pass the filters, [R, V] bool, and without wait, rows where this is not determined, [R] bool.

    logits: [R, V] float32.
    """
    vocab = logits.shape[1]
    width = min(vocab, max(rows.max_top_k, _ORDERED if rows.any_top_p_alone else 1))
    ordered, counts = _count_kept(logits, best, rows, width)
    unresolved = None
    if rows.any_top_p_alone and width < vocab:
        unresolved = (rows.top_k == 0) & (counts == width)
        if wait:
            if bool(unresolved.any()):
                ordered, counts = _count_kept(logits, best, rows, vocab)
            unresolved = None
    # The first `count` tokens in stable descending order: all above the last one's value, and of equal ones the lowest
    # ids.
    last = ordered.gather(1, (counts - 1).clamp(0, ordered.shape[1] - 1)[:, None])
    above, equal = logits > last, logits == last
    room = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room)) | (counts >= vocab)[:, None], unresolved


def _count_kept(logits: Tensor, best: Tensor, rows: RowParams, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits [R, width], descending, and the number of them that pass the filters, [R] int64.

    Rows without filters count V. A row without top_k that counts `width` may have more tokens that pass.
    """
    ordered = logits.topk(width, dim=-1).values
    p = ((ordered.double() - best[:, None].double()) / rows.temperature[:, None]).exp()
    limit = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])
    rank = torch.arange(width, device=logits.device)
    p = torch.where(rank < limit[:, None], p, 0.0)
    total = p.sum(-1)
    if rows.any_top_p_alone and width < logits.shape[1]:
        mass = ((logits.double() - best[:, None].double()) / rows.temperature[:, None]).exp().sum(-1)
        total = torch.where(rows.top_k > 0, total, mass)
    keep = rank < limit[:, None]
    nucleus = p.cumsum(-1) - p < (rows.top_p * total)[:, None]
    keep &= nucleus | (rows.top_p >= 1.0)[:, None]
    keep &= (p >= rows.min_p[:, None] * p[:, :1]) | (rows.min_p <= 0.0)[:, None]
    off = rows.greedy | ((rows.top_k == 0) & (rows.top_p >= 1.0) & (rows.min_p <= 0.0))
    return ordered, torch.where(off, logits.shape[1], keep.sum(-1))
