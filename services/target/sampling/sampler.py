"""Drawing tokens on the device: outrider.speculation.sampling for many rows at once, in PyTorch.

The same tokens as the NumPy oracle, for less work. Gumbel noise is computed for every token in float32 first, which
names a few candidates; only these are weighed in float64. Filters need the order of the likeliest tokens alone, and
rows without filters, and greedy rows, don't pay for those that have them. On CPUs a compiled kernel draws the same
tokens where it can be had (kernels/cpu/sampling.py), and this is its plain twin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams
from services.target.sampling import masks, penalties
from services.target.sampling.penalties import Adjustments
from services.target.step.token_mask import TokenMask
from services.target.step.upload import UploadBatch

# The winner is among the best of the approximate scores: these err by less than 0.3, and the chance that as many
# tokens as this come within that of the best one is below 1e-20.
_CANDIDATES = 32
# Tokens that are put in order at first where top_p alone limits them; all of them if that does not suffice.
_ORDERED = 1024
# Parts in which a GPU goes through a row, over which one multiprocessor would be long. Most vocabularies are multiples.
_SHARED_BY = 64
UNSURE = -2  # in place of a token: see `draw`
_LOW16, _LOW17, _LOW32 = 0xFFFF, 0x1FFFF, 0xFFFFFFFF


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def _mix(x: Tensor) -> Tensor:
    """outrider.speculation.noise's mixer. int32 stands for uint32: products wrap alike, shifts are masked."""
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
    """Random bits of tokens, those of outrider.speculation.noise.token_bits.

    keys: [n, 2] int64, words in [0, 2^32); tokens: [v] int64. Returns [n, v] int64 in [0, 2^32).
    """
    return _bits32(keys[:, None, :], tokens).to(torch.int64) & _LOW32


def _gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of bits (int32), as the oracle has it: computed in float64, rounded to float32; as float64."""
    u = ((bits.to(torch.int64) & _LOW32).to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(u))).to(torch.float32).to(torch.float64)


def _rough_gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of bits (int32) in float32; off by less than 0.3 for the least of it and by 1e-5 for most."""
    # As 1 - u, because float32 is fine near 0, where the large noise is. ~bits is 2^32 - 1 - bits.
    rest = ((~bits).to(torch.float32) + 0.5) * 2.0**-32
    rest = torch.where(rest < 0, rest + 1.0, rest)
    return -torch.log(-torch.log1p(-rest).clamp(min=-noise.GUMBEL_MAX))


@dataclass(frozen=True)
class RowParams:
    """How each of R sampled rows is drawn. Tensors lie on the device; `any_*` flags on the host.

    If all rows are greedy, only what is banned is told, and the other tensors are empty.

    temperature: [R] float64, 1 for greedy rows; greedy: [R] bool
    top_k: [R] int64, 0 is off; top_p, min_p: [R] float64, 1 and 0 are off
    keys: [R, 2] int64, the noise keys of the drawn positions
    banned_rows, banned_tokens: [B] int64, pairs that cannot be drawn
    """

    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    banned_rows: Tensor
    banned_tokens: Tensor
    all_greedy: bool = field(kw_only=True)
    any_filter: bool = field(kw_only=True)
    any_top_p_alone: bool = field(kw_only=True)
    max_top_k: int = field(kw_only=True)

    @property
    def may_be_unsure(self) -> bool:
        """True if `pick` may answer UNSURE in a hurry."""
        return self.any_top_p_alone and not self.all_greedy


@dataclass(frozen=True)
class RowRequest:
    """How the rows of one session are drawn.

    positions: absolute positions of the drawn tokens, one a row; banned: for each row, token ids that cannot be drawn
    """

    params: SamplingParams
    positions: Sequence[int]
    banned: Sequence[Sequence[int]]


def gather(requests: Sequence[RowRequest], device: torch.device) -> RowParams:
    """Lay out the sessions' requests row by row."""
    parcel = UploadBatch()
    rows = lay_out(requests, parcel)
    parcel.send(device)
    return rows()


def lay_out(requests: Sequence[RowRequest], parcel: UploadBatch) -> Callable[[], RowParams]:
    """As `gather`, in a parcel that is to be sent."""
    counts = [len(request.positions) for request in requests]
    params = [request.params for request in requests]

    def column(values: Sequence[float], dtype: type) -> NDArray[np.generic]:
        return np.repeat(np.array(values, dtype=dtype), counts)

    keys = [noise.position_keys(r.params.seed, np.array(r.positions)) for r in requests if not r.params.greedy]
    all_keys = np.zeros((sum(counts), 2), dtype=np.int64)
    noisy = np.repeat([not p.greedy for p in params], counts)
    if keys:
        all_keys[noisy] = np.concatenate(keys)
    banned = [tokens for request in requests for tokens in request.banned]
    pairs = np.array([(row, token) for row, tokens in enumerate(banned) for token in tokens], np.int64).reshape(-1, 2)
    drawn = [p for p in params if not p.greedy]
    columns = [
        column([1.0 if p.greedy else p.temperature for p in params], np.float64),
        column([p.greedy for p in params], np.bool_),
        column([p.top_k for p in params], np.int64),
        column([p.top_p for p in params], np.float64),
        column([p.min_p for p in params], np.float64),
        all_keys,
        pairs[:, 0].copy(),
        pairs[:, 1].copy(),
    ]
    if not drawn:  # nobody looks at how greedy rows are drawn
        columns[:6] = [column[:0] for column in columns[:6]]
    placed = parcel.add(columns)
    return lambda: RowParams(
        *placed(),
        all_greedy=not drawn,
        any_filter=any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn),
        any_top_p_alone=any((p.top_p < 1.0 or p.min_p > 0.0) and not p.top_k for p in drawn),
        max_top_k=max((p.top_k for p in drawn), default=0),
    )


def draw(
    logits: Tensor, rows: RowParams, adjustments: Adjustments | None = None, mask: TokenMask | None = None
) -> Tensor:
    """The token after each row. logits: [R, V], any float dtype. Returns [R] int64; -1 where logits are not finite."""
    return pick(adjusted(logits, (rows.banned_rows, rows.banned_tokens), adjustments, mask), rows)


def adjusted(
    logits: Tensor,
    banned: tuple[Tensor, Tensor] | None,
    adjustments: Adjustments | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """Logits after penalties, bias, grammar and bans: [R, V] float32, or the very logits where there is none of that.

    logits: [R, V], which are not changed; banned: rows and tokens, [B] int64 each, pairs that cannot be drawn
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


def pick(logits: Tensor, rows: RowParams, *, hurry: bool = False) -> Tensor:
    """The token after each row, given adjusted logits. Returns [R] int64; -1 where they are not finite.

    hurry: do not wait for the device to find out whether the likeliest tokens were enough; rows for which they were not
    get UNSURE, and want to be drawn again without hurry.
    """
    if rows.all_greedy and (greedy := _greedy(logits.device)) is not None:
        return greedy(logits)
    logits = logits.float()
    best, argmax = likeliest(logits, 1 if logits.device.type == "cpu" else _SHARED_BY)
    tokens = argmax
    if not rows.all_greedy:
        tokens = torch.where(rows.greedy, argmax, _draw_noisy(logits, best, rows, hurry))
    return torch.where(best.isfinite(), tokens, -1)


@lru_cache
def _greedy(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """A device's kernel for rows that are all greedy."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from services.target.kernels.cuda.greedy import greedy

    return greedy


def likeliest(logits: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and the first token that has it, [R] each. logits: [R, V].

    parts: of a row, that a device goes through side by side if they are of one size
    """
    if parts == 1 or logits.shape[1] % parts:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    bests, places = logits.unflatten(1, (parts, -1)).max(dim=-1)
    best, part = bests.max(dim=-1)
    return best, part * (logits.shape[1] // parts) + places.gather(1, part[:, None])[:, 0]


def probabilities(logits: Tensor, rows: RowParams, parents: Tensor, tokens: Tensor) -> Tensor:
    """How probable tokens are to be drawn after rows that are not greedy, given adjusted logits.

    parents, tokens: [n] int64, rows and token ids. Returns [n] float32.
    """
    logits = logits.float()
    if rows.any_filter:
        logits = logits.masked_fill(~_kept(logits, logits.max(dim=-1).values, rows)[0], -torch.inf)
    scaled = logits / rows.temperature.float()[:, None]
    return (scaled[parents, tokens] - scaled.logsumexp(dim=-1)[parents]).exp()


def _draw_noisy(logits: Tensor, best: Tensor, rows: RowParams, hurry: bool) -> Tensor:
    """argmax(log p + noise); as log p is used up to a constant a row, nothing is normalised. Returns [R] int64."""
    unsure = None
    if rows.any_filter:
        kept, unsure = _kept(logits, best, rows, hurry)
        logits = logits.masked_fill(~kept, -torch.inf)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    rough = (logits - best[:, None]) / rows.temperature.float()[:, None]
    rough += _rough_gumbel(_bits32(rows.keys[:, None, :], tokens))
    _, candidates = rough.topk(min(_CANDIDATES, logits.shape[1]), dim=-1, sorted=False)
    candidates, _ = candidates.sort(dim=-1)  # so that the first of equals is the lowest id
    scores = (logits.gather(1, candidates).double() - best[:, None].double()) / rows.temperature[:, None]
    scores += _gumbel(_bits32(rows.keys[:, None, :], candidates))
    drawn = candidates.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    return drawn if unsure is None else torch.where(unsure, UNSURE, drawn)


def _kept(logits: Tensor, best: Tensor, rows: RowParams, hurry: bool = False) -> tuple[Tensor, Tensor | None]:
    """Which tokens the filters leave, [R, V] bool, and in a hurry, in which rows this is not sure, [R] bool.

    logits: [R, V] float32.
    """
    vocab = logits.shape[1]
    width = min(vocab, max(rows.max_top_k, _ORDERED if rows.any_top_p_alone else 1))
    ordered, counts = _count_kept(logits, best, rows, width)
    unsure = None
    if rows.any_top_p_alone and width < vocab:
        unsure = (rows.top_k == 0) & (counts == width)
        if not hurry:
            if bool(unsure.any()):
                ordered, counts = _count_kept(logits, best, rows, vocab)
            unsure = None
    # The first `count` tokens in stable descending order: all above the last one's value, and of its equals the
    # lowest ids.
    last = ordered.gather(1, (counts - 1).clamp(0, ordered.shape[1] - 1)[:, None])
    above, equal = logits > last, logits == last
    room = counts[:, None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room)) | (counts >= vocab)[:, None], unsure


def _count_kept(logits: Tensor, best: Tensor, rows: RowParams, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits [R, width] in descending order, and how many of them the filters leave [R] int64.

    Rows without filters count V. A row without top_k that counts `width` may have more tokens left.
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
