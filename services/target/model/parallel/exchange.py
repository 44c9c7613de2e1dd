"""The exchanges between ranks in a forward pass. Every rank calls them in the same order.

They work on the group of all ranks: NCCL on CUDA, where CUDA graphs can capture them, and gloo on CPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

# Its name since PyTorch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def keep_hooks(replaced: nn.Module, by: nn.Module) -> None:
    """Give a module the exchanges of the one that it replaces."""
    for before in replaced._forward_pre_hooks.values():
        by.register_forward_pre_hook(before)
    for after in replaced._forward_hooks.values():
        by.register_forward_hook(after)


def sum_of_ranks(part: Tensor) -> Tensor:
    """The sum of all ranks' tensors, which replaces this one."""
    if torch.compiler.is_compiling():
        summed: Tensor = torch.ops.outrider.sum_of_ranks(part)
        return summed
    part = part.contiguous()
    dist.all_reduce(part)
    return part


def join_columns(part: Tensor, size: int) -> Tensor:
    """All ranks' columns side by side. part: [..., columns of this rank], as `torch.chunk` divides `size` columns."""
    ranks = dist.get_world_size()
    width = -(-size // ranks)
    rows = functional.pad(part, (0, width - part.shape[-1])).reshape(-1, width).contiguous()
    gathered = rows.new_empty(ranks * len(rows), width)
    _gather(gathered, rows)
    whole = gathered.view(ranks, len(rows), width).transpose(0, 1).reshape(*part.shape[:-1], ranks * width)
    return whole if ranks * width == size else whole[..., :size].contiguous()


def all_agree(yes: bool) -> bool:
    """True if this holds on all ranks; exchanged on the host."""
    return bool(least_of_ranks(int(yes)))


def least_of_ranks(number: int) -> int:
    """The smallest of all ranks' numbers; exchanged on the host."""
    least = torch.tensor([number])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


@torch.library.custom_op("outrider::sum_of_ranks", mutates_args=())
def _opaque(part: Tensor) -> Tensor:
    """`sum_of_ranks` as one operation of compiled programs."""
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole)
    return whole


@_opaque.register_fake
def _(part: Tensor) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)
