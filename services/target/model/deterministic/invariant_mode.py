"""--deterministic for models that run module by module: batch-invariant replacements of PyTorch's operators.

PyTorch's products choose their algorithm by the number of rows; on CPUs its functions compute the last numbers of an
array with other code than the rest, and its sums treat a single row differently. During a forward pass, a torch
function mode replaces these calls by our kernels; all other operators treat rows alike. An operator that is missing
here and does not treat rows alike is found at start-up by batch_invariance.py.
"""

# Parameters have PyTorch's names, and torch.nn.functional its usual letter.
# ruff: noqa: A001, A002, N812

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from outrider.errors import ConfigError
from services.target.kernels.cpu.matrices import rowwise
from services.target.kernels.cpu.matrices.rowwise import Function


class Kernels(Protocol):
    """Batch-invariant kernels of a device. Rows [P, inputs], matrices [M, outputs, inputs], bias [M, outputs]."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Products of M equal groups of adjacent rows with one matrix each. Returns [P, outputs]."""
        ...

    def grouped(self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        """Products of the first counts[0] rows with the first matrix, of the next counts[1] with the second, ..."""
        ...

    def sums(self, x: Tensor, scale: float) -> Tensor:
        """Sums over the last dimension, divided by `scale`."""
        ...


class CpuKernels:
    """`Kernels` in C++."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Kernels`."""
        groups = len(weight)
        each = x.shape[0] // groups
        return rowwise.product(x, weight, bias, torch.arange(groups + 1) * each, torch.arange(groups))

    def grouped(self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        """As `Kernels`."""
        which = counts.nonzero()[:, 0]
        first = F.pad(counts[which].cumsum(0), (1, 0))
        return rowwise.product(x, weight, bias, first, which)

    def sums(self, x: Tensor, scale: float) -> Tensor:
        """As `Kernels`."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) == 1:
            rows = rows.expand(2, -1).contiguous()
        sums = rows.contiguous().sum(-1)[: x.numel() // x.shape[-1]].view(x.shape[:-1])
        return sums if scale == 1.0 else sums / scale


class CudaKernels:
    """`Kernels` in Triton."""

    def __init__(self) -> None:
        from services.target.kernels.cuda import invariant_matmul

        self._kernels = invariant_matmul

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Kernels`."""
        return self._kernels.product(x, weight, bias, len(weight))

    def grouped(self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        """As `Kernels`."""
        return self._kernels.grouped(x, weight, bias, counts)

    def sums(self, x: Tensor, scale: float) -> Tensor:
        """As `Kernels`."""
        return self._kernels.row_sums(x, scale)


class BatchInvariantMode(TorchFunctionMode):
    """Inside this mode, calls of PyTorch's functions are batch-invariant."""

    _kernels: ContextVar[Kernels] = ContextVar("kernels")

    @classmethod
    def current(cls) -> Kernels:
        """The kernels of the active mode."""
        return cls._kernels.get()

    def __init__(self, kernels: Kernels, *, functions: bool) -> None:
        """functions: also replace elementwise functions, which CPUs need."""
        super().__init__()
        self.kernels = kernels
        self._token: Token[Kernels] | None = None
        products = _Products(kernels)
        table: dict[Any, Callable[..., Any]] = {name: _refusing(name) for name in _NOT_COVERED}
        table |= {name: getattr(products, method) for method, names in _PRODUCTS.items() for name in names}
        table |= {name: functools.partial(_summed, kernels, name, mean) for mean, names in _SUMS for name in names}
        if functions:
            table |= _functions()
        self._table = table

    def __enter__(self) -> Self:
        """Activate the mode. It does not nest."""
        self._token = self._kernels.set(self.kernels)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Deactivate the mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._token is not None, "it was turned on"
        self._kernels.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the replacement of `func`, or `func` itself."""
        return self._table.get(func, func)(*args, **(kwargs or {}))


def of(device: torch.device) -> BatchInvariantMode:
    """The mode for a device."""
    if device.type == "cuda":
        return BatchInvariantMode(CudaKernels(), functions=False)
    return BatchInvariantMode(CpuKernels(), functions=True)


# --- products ---

_PRODUCTS: dict[str, tuple[Any, ...]] = {
    "linear": (F.linear,),
    "matmul": (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
    "rmatmul": (Tensor.__rmatmul__,),
    "add": (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm),
}
_NOT_COVERED: tuple[Any, ...] = (
    torch.einsum, torch.addbmm, torch.addmv, torch.mv, Tensor.mv, torch.dot, torch.inner, torch.tensordot,
    torch.bilinear, F.bilinear, F.conv1d, F.conv2d, F.scaled_dot_product_attention, torch._grouped_mm,
)  # fmt: skip


class _Products:
    """PyTorch's products by `Kernels`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = self._product(input.reshape(-1, input.shape[-1]), weight[None], bias)
        return rows.view(*input.shape[:-1], weight.shape[0])

    def matmul(self, input: Tensor, other: Tensor) -> Tensor:
        if input.dim() == 1:
            return self.matmul(input[None], other).squeeze(-2)
        if other.dim() == 1:
            return self.matmul(input, other[:, None]).squeeze(-1)
        if input.shape[-1] == 1 or not input.is_floating_point():  # nothing to sum, or exact
            return input * other if input.shape[-1] == 1 else torch.matmul(input, other)
        if other.dim() == 2:
            return self.linear(input, other.t())
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
        rows = input.expand(*batch, -1, -1).reshape(-1, input.shape[-1])
        matrices = other.expand(*batch, -1, -1).reshape(-1, *other.shape[-2:])
        return self._product(rows, matrices.transpose(1, 2), None).view(*batch, input.shape[-2], -1)

    def rmatmul(self, input: Tensor, other: Tensor) -> Tensor:
        return self.matmul(other, input)

    def add(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return beta * input + alpha * self.matmul(mat1, mat2)

    def _product(self, rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        if rows.dtype != matrices.dtype or rows.dtype == torch.float64:
            raise ConfigError(f"--deterministic does not cover products of {rows.dtype} and {matrices.dtype}")
        return self._kernels.product(rows, matrices, None if bias is None else bias[None])


def _refusing(func: Any) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"--deterministic does not cover {resolve_name(func) or func}, which this model calls; leave the flag out"
        )

    return refuse


# --- sums over the last dimension ---

_SUMS: tuple[tuple[bool, tuple[Any, ...]], ...] = (
    (False, (torch.sum, Tensor.sum)),
    (True, (torch.mean, Tensor.mean)),
)


def _summed(
    kernels: Kernels,
    func: Any,
    mean: bool,
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """func: called for sums over other dimensions than the last one."""
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    dtype = dtype or input.dtype
    if dims not in ((-1,), (input.dim() - 1,)) or not dtype.is_floating_point or dtype == torch.float64:
        arguments = {} if dim is None else {"dim": dim, "keepdim": keepdim}
        result: Tensor = func(input, **arguments, dtype=dtype if dtype != input.dtype else None)
        return result
    sums = kernels.sums(input.to(dtype), float(input.shape[-1]) if mean else 1.0)
    return sums[..., None] if keepdim else sums


# --- functions of single numbers, on CPUs ---

_COMPILED: dict[Function, tuple[Any, ...]] = {
    Function.SIGMOID: (torch.sigmoid, Tensor.sigmoid, torch.special.expit, F.sigmoid),
    Function.SILU: (F.silu,),
    Function.GELU_TANH: (F.gelu,),  # if it is approximated so
}
_BY_NAME = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p",
    "log2", "sin", "sinc", "sinh", "tan", "tanh", "rsqrt",
)  # fmt: skip
_IN_PLACE = (torch.sigmoid_, Tensor.sigmoid_, torch.tanh_, Tensor.tanh_, torch.exp_, Tensor.exp_, Tensor.pow_)
_OTHERS = (F.softplus, F.mish, F.elu, F.selu, F.celu, F.logsigmoid, F.tanh, F.hardswish)
_POWERS = (torch.pow, Tensor.pow, Tensor.__pow__)
_EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # which PyTorch makes of products, quotients and roots


def _functions() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        name: functools.partial(_compiled, function, name) for function, names in _COMPILED.items() for name in names
    }
    for name in _BY_NAME:
        for owner in (torch, Tensor):
            func = getattr(owner, name, None)
            if func is not None:
                table[func] = functools.partial(_pieces, func)
    table |= {func: functools.partial(_pieces, func) for func in _OTHERS}
    table |= {func: functools.partial(_power, func) for func in _POWERS}
    return table | {func: _refusing(func) for func in _IN_PLACE}


def _pieces(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not input.is_floating_point():
        input = input.float()
    return rowwise.in_pieces(lambda piece: func(piece, *args, **kwargs), input)


def _compiled(function: Function, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's function where there is no compiled one: another format, or GELU with the error function."""
    approximate = args[0] if args else kwargs.get("approximate", "none")
    if function == Function.GELU_TANH and approximate != "tanh":
        return _pieces(func, input, *args, **kwargs)
    if input.dtype not in (torch.float32, torch.bfloat16):
        return _pieces(func, input, *args, **kwargs)
    return rowwise.apply(function, input)


def _power(func: Any, input: Any, exponent: Any) -> Any:
    if isinstance(input, Tensor) and isinstance(exponent, int | float):
        if exponent in _EXACT_POWERS:
            return func(input, exponent)
        return _pieces(func, input, exponent)
    return _refusing(func)()
