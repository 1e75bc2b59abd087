"""The oracle: every operation (forward.py) and every gradient (backward.py) in plain torch."""

from dsv4.reference.forward import (
    apply_rope,
    attend,
    fmha,
    fmha_paged,
    fmha_varlen,
    listed,
    merge_states,
    pool_rows,
    request_of,
    rope_table,
    rows_per_page,
    v4_attention,
    visible,
)

__all__ = [
    "apply_rope",
    "attend",
    "fmha",
    "fmha_paged",
    "fmha_varlen",
    "listed",
    "merge_states",
    "pool_rows",
    "request_of",
    "rope_table",
    "rows_per_page",
    "v4_attention",
    "visible",
]
