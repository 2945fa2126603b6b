"""Small matrix products out of register tiles, for attention.

Owns:      the choice of tiles for a shape. ``outer`` multiplies by a matrix with rows along the result's columns
           (fast for many rows), ``dot`` by one with rows along the summed dimension (no transposition needed).
Never:     threads, packs, or chooses blocks for caches; callers do.
Invariant: an element's sum is taken in the same order whatever the number of rows and columns, and whatever the tile.
Thread:    any; inside kernels only. Addresses and strides are in bytes, sizes in floats.
"""

from replicas.kernels.register_tiles import dot_tile, outer_tile
from replicas.kernels.simd import W, compiles_for
from replicas.kernels.team import inlined

# AVX-512 has 32 registers of 16 floats; AVX2 has 8 pairs of registers, NEON 8 fours: sums of a larger tile would lie in
# memory (960 x 576 by 256 rows on one AVX2 core of Zen 4: 28 GFLOP/s by tiles of 6 x 64, 79 by 6 x 16)
MANY_REGISTERS = compiles_for("avx512f")
_OUTER_6X4, _OUTER_4X4, _OUTER_3X4, _OUTER_2X4, _OUTER_1X4 = (outer_tile(r, 4, fetches=False) for r in (6, 4, 3, 2, 1))
_OUTER_6X1, _OUTER_3X1, _OUTER_1X1 = (outer_tile(r, 1, fetches=False) for r in (6, 3, 1))
_FETCH_6X4, _FETCH_4X4, _FETCH_3X4, _FETCH_1X4 = (outer_tile(r, 4, fetches=True) for r in (6, 4, 3, 1))
_FETCH_6X1, _FETCH_4X1, _FETCH_3X1, _FETCH_1X1 = (outer_tile(r, 1, fetches=True) for r in (6, 4, 3, 1))
_DOT_4X4, _DOT_1X4 = (dot_tile(rows, 4) for rows in (4, 1))
_DOT_3X2, _DOT_2X2 = (dot_tile(rows, 2) for rows in (3, 2))
_DOT_4X1, _DOT_1X1 = (dot_tile(rows, 1) for rows in (4, 1))


@inlined
def outer(m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, keep: int) -> None:
    """Compute c[m, n] = a[m, k] @ b[k, n], added to c if ``keep`` is 1; n is a multiple of 16, b lies in cache."""
    column = 0
    while column < n:
        wide = MANY_REGISTERS and n - column >= 4 * W
        b_at, row = b + 4 * column, 0
        while row < m:
            a_at, c_at, left = a + row * lda, c + row * ldc + 4 * column, m - row
            if wide:
                row += _outer_wide(left, a_at, lda, b_at, ldb, c_at, ldc, k, keep)
            else:
                row += _outer_narrow(left, a_at, lda, b_at, ldb, c_at, ldc, k, keep)
        column += 4 * W if wide else W


@inlined
def _outer_wide(rows: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, k: int, keep: int) -> int:
    if rows >= 6:
        _OUTER_6X4(a, lda, b, ldb, c, ldc, k, keep)
        return 6
    if rows >= 4:
        _OUTER_4X4(a, lda, b, ldb, c, ldc, k, keep)
        return 4
    if rows == 3:
        _OUTER_3X4(a, lda, b, ldb, c, ldc, k, keep)
        return 3
    if rows == 2:
        _OUTER_2X4(a, lda, b, ldb, c, ldc, k, keep)
        return 2
    _OUTER_1X4(a, lda, b, ldb, c, ldc, k, keep)
    return 1


@inlined
def _outer_narrow(rows: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, k: int, keep: int) -> int:
    if rows >= 6:
        _OUTER_6X1(a, lda, b, ldb, c, ldc, k, keep)
        return 6
    if rows >= 3:
        _OUTER_3X1(a, lda, b, ldb, c, ldc, k, keep)
        return 3
    _OUTER_1X1(a, lda, b, ldb, c, ldc, k, keep)
    return 1


@inlined
def outer_fetch(
    m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, keep: int, ahead: int
) -> None:
    """Compute `outer` for b in memory; prefetches ``ahead`` bytes behind b."""
    column = 0
    while column < n:
        wide = n - column >= 4 * W and (MANY_REGISTERS or m <= 3)  # few rows: reading b once matters more
        b_at, row = b + 4 * column, 0
        while row < m:
            a_at, c_at, left = a + row * lda, c + row * ldc + 4 * column, m - row
            if wide and left >= 6:
                _FETCH_6X4(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 6
            elif wide and left >= 4:
                _FETCH_4X4(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 4
            elif wide and left == 3:
                _FETCH_3X4(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 3
            elif wide:
                _FETCH_1X4(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 1
            elif left >= 6 and left != 8 and left != 7:
                _FETCH_6X1(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 6
            elif left >= 4:
                _FETCH_4X1(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 4
            elif left >= 3:
                _FETCH_3X1(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 3
            else:
                _FETCH_1X1(a_at, lda, b_at, ldb, c_at, ldc, k, keep, ahead)
                row += 1
        column += 4 * W if wide else W


@inlined
def dot(m: int, n: int, k: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, ahead: int) -> None:
    """Compute c[m, n] = a[m, k] @ b[n, k].T; k is a multiple of 16. Each four rows of b are read once from memory;
    meanwhile asks for what lies ``ahead`` bytes behind them."""
    column = 0
    while column < n:
        wide = n - column >= 4
        b_at, row = b + column * ldb, 0
        while row < m:
            a_at, c_at, left = a + row * lda, c + row * ldc + 4 * column, m - row
            if wide:
                row += _dot_wide(left, a_at, lda, b_at, ldb, c_at, ldc, k, ahead)
            elif left >= 4:
                _DOT_4X1(a_at, lda, b_at, ldb, c_at, ldc, k, ahead)
                row += 4
            else:
                _DOT_1X1(a_at, lda, b_at, ldb, c_at, ldc, k, ahead)
                row += 1
        column += 4 if wide else 1


@inlined
def _dot_wide(rows: int, a: int, lda: int, b: int, ldb: int, c: int, ldc: int, k: int, ahead: int) -> int:
    if rows in (2, 3) or (not MANY_REGISTERS and rows > 3):  # two lines at a time: memory keeps up (decode: 10 %)
        if rows >= 3:
            _DOT_3X2(a, lda, b, ldb, c, ldc, k, ahead)
            _DOT_3X2(a, lda, b + 2 * ldb, ldb, c + 8, ldc, k, ahead)
            return 3
        _DOT_2X2(a, lda, b, ldb, c, ldc, k, ahead)
        _DOT_2X2(a, lda, b + 2 * ldb, ldb, c + 8, ldc, k, ahead)
        return 2
    if rows >= 4:
        _DOT_4X4(a, lda, b, ldb, c, ldc, k, ahead)
        return 4
    _DOT_1X4(a, lda, b, ldb, c, ldc, k, ahead)
    return 1
