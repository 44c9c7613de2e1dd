"""Which part of a tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor: along one dimension, the same interval of each of some equal groups.

    dim, size:   the dimension, and its length in the whole tensor
    groups:      1, or the number of matrices that are stacked along it, such as gates and values
    start, stop: the interval, within a group
    """

    dim: int
    size: int
    groups: int
    start: int
    stop: int

    def part(self, whole: Tensor) -> Tensor:
        """The part of a tensor; a view, if there is one group."""
        groups: Tensor = whole.unflatten(self.dim, (self.groups, -1))
        return groups.narrow(self.dim + 1, self.start, self.stop - self.start).flatten(self.dim, self.dim + 1)

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor. part: the shape of this part."""
        return (*part[: self.dim], self.size, *part[self.dim + 1 :])

    def of_matrix(self, matrices: int) -> Shard | None:
        """For a tensor that holds all experts of a layer, [experts, rows, columns]: the part of one expert's matrix.

        matrices: those that are stacked along the rows. None if a rank holds whole experts, or matrices.
        """
        if self.dim == 0 or (self.dim == 1 and self.groups != matrices):
            return None
        size = self.size // matrices if self.dim == 1 else self.size
        return replace(self, dim=self.dim - 1, size=size, groups=1)
