"""What the kernels of the experts take: NamedTuples that prepare.py makes, by what they describe."""

from typing import Any, NamedTuple


class SortedRows(NamedTuple):
    """One row for each slot of a token that has an expert, in the order of experts, then of tokens."""

    any_alignment = ("starts_ptr", "slot_ptr", "weight_ptr")

    starts_ptr: Any  # int32 [experts + 1]: first row of each expert
    slot_ptr: Any  # int32 [rows]: token * topk + slot
    weight_ptr: Any  # fp32 [rows]
    experts: Any
    atoms: Any  # of scales to 128 columns of activations, where they lie in atoms (sm100/products.py), or 0


class WeightTiles(NamedTuple):
    """Beside the descriptors: a factor of every row of weights, and how the tiles of an expert are counted."""

    factor_ptr: Any  # fp32 [experts, blocks, 256]
    blocks: Any  # tiles of 256 rows
    steps: Any  # of 128 columns


class Sizes(NamedTuple):
    """How the tiles of an expert are counted in both products: of 256 rows, by steps of 128 columns."""

    blocks1: Any
    steps1: Any
    blocks2: Any
    steps2: Any


class Signals(NamedTuple):
    """int32, 0 before the products (kernels/signals.py)."""

    any_alignment = ("ticket_ptr", "hidden_ptr")

    ticket_ptr: Any  # [1]: of tiles
    hidden_ptr: Any  # [experts]: compute roles that have written hidden values of a tile


class Hidden(NamedTuple):
    """What product 1 writes: e4m3 [rows, width], columns of a group of 128 in the order of the layout, and scales."""

    any_alignment = ("scale_ptr",)

    ptr: Any
    scale_ptr: Any  # [width / 128, scale_line]: fp32, or int32 with a byte four times
    width: Any
    scale_line: Any
    limit: Any  # of SwiGLU


class SlotOutputs(NamedTuple):
    """What product 2 writes: bf16 [tokens * topk, width], a row for each slot."""

    ptr: Any
    width: Any


class Choice(NamedTuple):
    """What the router chose: [tokens, topk], contiguous."""

    any_alignment = ("ids_ptr", "weights_ptr")

    ids_ptr: Any
    weights_ptr: Any
    slots: Any  # tokens * topk
    experts: Any


class SortOutputs(NamedTuple):
    any_alignment = ("starts_ptr", "slot_ptr", "weight_ptr", "row_ptr", "place_ptr", "signals_ptr")

    starts_ptr: Any  # as in SortedRows
    slot_ptr: Any
    weight_ptr: Any
    row_ptr: Any  # int32 [tokens * topk]: the row of each slot, -1 for none
    place_ptr: Any  # int32 [tokens * topk]: where the scales of that row are
    signals_ptr: Any  # int32 [1 + experts]: gets zeros


class Tokens(NamedTuple):
    """What the mega kernel (sm100/mega.py) is given, and where x goes in the pool of rows."""

    any_alignment = ("ids_ptr", "weights_ptr", "scale_ptr")

    ids_ptr: Any  # [tokens, topk]
    weights_ptr: Any
    slots: Any  # tokens * topk
    ptr: Any  # [tokens, width]
    line: Any  # from a token to the next, in eights
    width: Any
    to_ptr: Any  # [rows, width] in codes
    scale_ptr: Any


class Pool(NamedTuple):
    """Rows in tiles: those of an expert begin a tile."""

    any_alignment = ("place_ptr", "line_ptr", "weight_ptr")

    place_ptr: Any  # int32 [slots]: which row of its expert a slot has
    line_ptr: Any  # int64 [rows]: where its output goes in SlotOutputs, in eights
    weight_ptr: Any  # fp32 [rows]
    experts: Any
    atoms: Any  # tiles, as many as there can be


class Counters(NamedTuple):
    """int32, 0 when the kernel begins."""

    any_alignment = ("ptr", "hidden_ptr", "rows_ptr")

    ptr: Any  # tickets and counters, by their names in mega.py
    hidden_ptr: Any  # [atoms]: blocks of hidden values that are there
    rows_ptr: Any  # [experts]


class Peers(NamedTuple):
    """The other ranks: the same memory as this rank's, so far from it."""

    any_alignment = ("distance_ptr", "signals_ptr", "call_ptr")

    distance_ptr: Any  # int64 [ranks], in 16 bytes
    signals_ptr: Any  # int32 [2], of this rank, never 0 again: who is there, who has written
    call_ptr: Any  # int32: how many calls there were, with this one
    first: Any  # expert of this rank
    experts: Any  # of all ranks


class Total(NamedTuple):
    """What becomes of the outputs of slots."""

    shared_ptr: Any  # [tokens, width]
    out_ptr: Any
    out_line: Any  # in eights


class Pieces(NamedTuple):
    """Counts and bases of every piece of the slots, by experts."""

    any_alignment = ("counts_ptr", "bases_ptr")

    counts_ptr: Any  # int32 [pieces, experts]: slots
    bases_ptr: Any  # int32 [pieces, 2, experts]: first row of the piece's slots, and of the expert


class Activations(NamedTuple):
    """x as it is, and rows in the order of experts as e4m3 with scales."""

    any_alignment = ("row_ptr", "place_ptr", "scale_ptr")

    ptr: Any  # [tokens, width]
    line: Any  # from a token to the next, in eights
    groups: Any  # of 128 columns
    row_ptr: Any
    place_ptr: Any
    to_ptr: Any  # e4m3 [rows, width]
    scale_ptr: Any  # [width / 128, scale_line], as in Hidden
    scale_line: Any
    parts: Any  # programs to a token (moe_sort_rows)


class Sums(NamedTuple):
    """Outputs of slots, and what becomes of them."""

    slots_ptr: Any  # [tokens * topk, width]
    groups: Any  # of 128 columns
    shared_ptr: Any  # [tokens, width]
    out_ptr: Any
    out_line: Any  # in eights


class SharedRows(NamedTuple):
    """x of the shared expert: as it is, and rounded. Line and width in eights."""

    ptr: Any  # [tokens, width]
    line: Any  # from a token to the next
    width: Any
    to_ptr: Any  # [tokens, width]


class SharedHidden(NamedTuple):
    """Its gate and up, and its hidden values, rounded. Width in eights."""

    ptr: Any  # [tokens, 2 width]
    width: Any
    limit: Any  # of SwiGLU
    to_ptr: Any  # [tokens, width]


class Logits(NamedTuple):
    """x [tokens, width] and gate [experts, width], and the logits of all, chunk by chunk. Lines and width in units (of
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
    """How experts are chosen, and where the choice goes."""

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
