"""How many pairs of a query and a key there are: all of them, or those that the mask shows."""

from __future__ import annotations

__all__ = ["all_pairs", "visible_pairs"]


def all_pairs(queries: int, keys: int) -> int:
    """queries · keys: what dense kernels and the usual counters count."""
    return queries * keys


def visible_pairs(queries: int, keys: int, *, causal: bool, window: int | None = None) -> int:
    """Pairs that a mask shows, exactly: query i sees keys j ≤ i + keys − queries (bottom-right).

    With n queries and keys and no window, n (n + 1) / 2. A window of W keys, the query's own
    included, hides the others: n W − W (W − 1) / 2 for n ≥ W.

    Args:
        queries: the last so many positions.
        keys: all positions, cached ones included.
        causal: False: a query sees every key.
        window: of a causal mask.

    Example:
        >>> visible_pairs(5, 5, causal=True), visible_pairs(1, 5, causal=True)
        (15, 5)
        >>> visible_pairs(5, 5, causal=True, window=2)
        9
    """
    if not causal:
        return queries * keys
    # Query i (from the last) sees keys − i keys: from `low` up to `keys`, at most `window` each.
    low = max(keys - queries + 1, 1)
    most = keys if window is None else min(window, keys)
    if low > most:
        return (keys - low + 1) * most
    rising = (low + most) * (most - low + 1) // 2
    return rising + (keys - most) * most
