"""The oracle: every operation (forward.py, experts.py) and every gradient (backward.py) in plain torch."""

from dsv4.reference.experts import moe, moe_route
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
    "moe",
    "moe_route",
    "pool_rows",
    "request_of",
    "rope_table",
    "rows_per_page",
    "v4_attention",
    "visible",
]
