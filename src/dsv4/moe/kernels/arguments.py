"""Arguments of the experts' kernels: NamedTuples that prepare.py makes, grouped by what they describe."""

from typing import Any, NamedTuple


class SortedRows(NamedTuple):
    """One row for each slot of a token that has an expert, in the order of experts, then tokens."""

    any_alignment = ("starts_ptr", "slot_ptr", "weight_ptr")

    starts_ptr: Any  # int32 [experts + 1]: first row of each expert
    slot_ptr: Any  # int32 [rows]: token * topk + slot
    weight_ptr: Any  # fp32 [rows]
    experts: Any
    atoms: Any  # atoms of scales per 128 columns of activations, if they lie in atoms (sm100/products.py), or 0


class WeightTiles(NamedTuple):
    """Arguments besides the descriptors: a factor for every row of weights, and the tile counts of an expert."""

    factor_ptr: Any  # fp32 [experts, blocks, 256]
    blocks: Any  # tiles of 256 rows
    steps: Any  # steps of 128 columns


class Sizes(NamedTuple):
    """Tile counts of an expert in both products: tiles of 256 rows, in steps of 128 columns."""

    blocks1: Any
    steps1: Any
    blocks2: Any
    steps2: Any


class Signals(NamedTuple):
    """int32 counters that are 0 before the products (kernels/signals.py)."""

    any_alignment = ("ticket_ptr", "hidden_ptr")

    ticket_ptr: Any  # [1]: ticket of tiles
    hidden_ptr: Any  # [experts]: compute roles that have written hidden values of a tile


class Hidden(NamedTuple):
    """Output of product 1: e4m3 [rows, width], columns of a group of 128 in the order of the layout, and scales."""

    any_alignment = ("scale_ptr",)

    ptr: Any
    scale_ptr: Any  # [width / 128, scale_line]: fp32, or int32 with one byte repeated four times
    width: Any
    scale_line: Any
    limit: Any  # limit of SwiGLU


class SlotOutputs(NamedTuple):
    """Output of product 2: bf16 [tokens * topk, width], a row for each slot."""

    ptr: Any
    width: Any


class Choice(NamedTuple):
    """The router's choice, [tokens, topk], contiguous."""

    any_alignment = ("ids_ptr", "weights_ptr")

    ids_ptr: Any
    weights_ptr: Any
    slots: Any  # tokens * topk
    experts: Any


class SortOutputs(NamedTuple):
    any_alignment = ("starts_ptr", "slot_ptr", "weight_ptr", "row_ptr", "place_ptr", "signals_ptr")

    starts_ptr: Any  # see SortedRows
    slot_ptr: Any
    weight_ptr: Any
    row_ptr: Any  # int32 [tokens * topk]: the row of each slot, -1 for none
    place_ptr: Any  # int32 [tokens * topk]: where the scales of that row are
    signals_ptr: Any  # int32 [1 + experts]: set to 0


class Tokens(NamedTuple):
    """Inputs of the mega kernel (sm100/mega.py), and where x goes in the pool of rows."""

    any_alignment = ("ids_ptr", "weights_ptr", "scale_ptr")

    ids_ptr: Any  # [tokens, topk]
    weights_ptr: Any
    slots: Any  # tokens * topk
    ptr: Any  # [tokens, width]
    line: Any  # stride of tokens, in units of 8 elements
    width: Any
    to_ptr: Any  # [rows, width] in codes
    scale_ptr: Any


class Pool(NamedTuple):
    """Rows in tiles; the rows of each expert begin a new tile."""

    any_alignment = ("place_ptr", "line_ptr", "weight_ptr")

    place_ptr: Any  # int32 [slots]: row of a slot within its expert
    line_ptr: Any  # int64 [rows]: where its output goes in SlotOutputs, in eights
    weight_ptr: Any  # fp32 [rows]
    experts: Any
    atoms: Any  # the most tiles there can be


class Counters(NamedTuple):
    """int32 counters that are 0 when the kernel begins."""

    any_alignment = ("ptr", "hidden_ptr", "rows_ptr")

    ptr: Any  # tickets and counters, by their names in mega.py
    hidden_ptr: Any  # [atoms]: blocks of hidden values that are written
    rows_ptr: Any  # [experts]


class Peers(NamedTuple):
    """The other ranks: the same memory layout as this rank's, at a distance from it."""

    any_alignment = ("distance_ptr", "signals_ptr", "call_ptr")

    distance_ptr: Any  # int64 [ranks], in 16 bytes
    signals_ptr: Any  # int32 [2], of this rank, never reset: ranks that are there, ranks that have written
    call_ptr: Any  # int32: number of calls, including this one
    first: Any  # first expert of this rank
    experts: Any  # experts of all ranks


class Total(NamedTuple):
    """The sum over slots: the shared expert's output and the result."""

    shared_ptr: Any  # [tokens, width]
    out_ptr: Any
    out_line: Any  # stride of lines of out, in units of 8 elements


class Pieces(NamedTuple):
    """Counts and bases of every piece of the slots, per expert."""

    any_alignment = ("counts_ptr", "bases_ptr")

    counts_ptr: Any  # int32 [pieces, experts]: slots
    bases_ptr: Any  # int32 [pieces, 2, experts]: first row of the piece's slots, and of the expert


class Activations(NamedTuple):
    """x itself, and rows in the order of experts as e4m3 with scales."""

    any_alignment = ("row_ptr", "place_ptr", "scale_ptr")

    ptr: Any  # [tokens, width]
    line: Any  # stride of tokens, in units of 8 elements
    groups: Any  # groups of 128 columns
    row_ptr: Any
    place_ptr: Any
    to_ptr: Any  # e4m3 [rows, width]
    scale_ptr: Any  # [width / 128, scale_line], as in Hidden
    scale_line: Any
    parts: Any  # programs per token (moe_sort_rows)


class Sums(NamedTuple):
    """Outputs of slots, and their sum."""

    slots_ptr: Any  # [tokens * topk, width]
    groups: Any  # groups of 128 columns
    shared_ptr: Any  # [tokens, width]
    out_ptr: Any
    out_line: Any  # stride of lines of out, in units of 8 elements


class SharedRows(NamedTuple):
    """x of the shared expert, as it is and rounded. Line and width are in eights."""

    ptr: Any  # [tokens, width]
    line: Any  # stride of tokens
    width: Any
    to_ptr: Any  # [tokens, width]


class SharedHidden(NamedTuple):
    """Gate and up of the shared expert, and its rounded hidden values. Width is in eights."""

    ptr: Any  # [tokens, 2 width]
    width: Any
    limit: Any  # limit of SwiGLU
    to_ptr: Any  # [tokens, width]


class Logits(NamedTuple):
    """x [tokens, width] and gate [experts, width], and all logits, by chunks. Lines and width are in units (see
    route.py)."""

    any_alignment = ("logits_ptr",)

    ptr: Any
    line: Any
    gate_ptr: Any
    gate_line: Any
    tokens: Any
    experts: Any
    width: Any
    logits_ptr: Any  # fp32 [chunks or 1, tokens, experts]


class Rules(NamedTuple):
    """Rules for the choice of experts, and its outputs."""

    any_alignment = ("bias_ptr", "bias_vl_ptr", "image_ptr", "table_ptr", "token_ids_ptr", "ids_ptr", "weights_ptr")

    bias_ptr: Any
    bias_vl_ptr: Any
    image_ptr: Any
    table_ptr: Any
    vocabulary: Any
    token_ids_ptr: Any
    ids_ptr: Any
    weights_ptr: Any
    eps: Any
    scale: Any
