"""The positions of a padded batch's real tokens. Every layer except attention works on the N real tokens only.

Removing padding moves each row's tokens to the left without gaps. The causal mask is then enough for attention: the
remaining padding comes after every real query of its row.

Shapes: B rows, T longest row, N real tokens.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """The place of each token: row rows_N[n] of the batch, position positions_N[n], column columns_N[n] of the grid."""

    num_rows: int
    num_columns: int
    rows_N: np.ndarray
    columns_N: np.ndarray
    positions_N: np.ndarray
    first_B: np.ndarray  # the position of column 0: 0, or what a cache already holds

    @property
    def is_full(self) -> bool:
        return len(self.rows_N) == self.num_rows * self.num_columns

    def grid(self, x_N):
        """Return x as a grid, (N, …) → (B, T, …), with zeros after shorter rows."""
        shape = (self.num_rows, self.num_columns, *x_N.shape[1:])
        if self.is_full:
            return x_N.reshape(shape)
        x_BT = np.zeros(shape, x_N.dtype)
        x_BT[self.rows_N, self.columns_N] = x_N
        return x_BT

    def flat(self, x_BT):
        """Return the tokens of a grid, (B, T, …) → (N, …); the transpose of `grid`, and so its backward."""
        if self.is_full:
            return x_BT.reshape(-1, *x_BT.shape[2:])
        return x_BT[self.rows_N, self.columns_N]


def layout_of(lengths_B, first_B):
    """Return the layout of rows with lengths_B[b] new tokens, after first_B[b] tokens that a cache already holds."""
    num_rows, num_columns = len(lengths_B), int(lengths_B.max())
    rows_N, columns_N = np.nonzero(np.arange(num_columns) < lengths_B[:, None])
    return Layout(num_rows, num_columns, rows_N, columns_N, columns_N + first_B[rows_N], first_B)
