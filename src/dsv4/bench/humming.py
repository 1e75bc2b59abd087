"""A layer of MXFP4 experts by Humming, which vLLM prefers on Hopper: the suite `moe`'s peer.

    python -m zipfile -e humming_kernels-0.1.19-*.whl peers/      chmod +x peers/humming/_native/*/nvrtc_compile
    HUMMING_COMPILER=nvcc PYTHONPATH=src:peers python -m dsv4 bench --suite moe

It also needs cuda-bindings, safetensors, tqdm, tabulate and filelock, and compiles kernels at run time (10 s each,
several at once). A call quantises activations, multiplies, applies SwiGLU and quantises, multiplies, and sums the slots
of a token. Slots are sorted beforehand, which dsv4.moe does in its call. `scales`: one for 128 columns of activations,
as the model has them, or one for a token (0). `form`: "grouped_contiguous", rows in the order of experts, or "indexed",
rows picked by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATION = "(fminf(a, 10.f) / (1.f + __expf(-fminf(a, 10.f)))) * fminf(fmaxf(b, -10.f), 10.f)"


@triton.jit
def weighted_sum(
    slots_ptr, rows_ptr, weights_ptr, out_ptr, WIDTH: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum COLUMNS columns of a token: one program."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOPK):
        row = tl.load(rows_ptr + token * TOPK + j).to(tl.int64)
        y = tl.load(slots_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
        total += y.to(tl.float32) * tl.load(weights_ptr + token * TOPK + j)
    tl.store(out_ptr + token.to(tl.int64) * WIDTH + column, total.to(tl.bfloat16), mask=column < WIDTH)


class Humming:
    """Both matrices of a layer, in its own layout."""

    def __init__(self, weights: dict[str, Tensor], scales: int) -> None:
        w13 = torch.cat([weights["w1"], weights["w3"]], 1), torch.cat([weights["w1_scale"], weights["w3_scale"]], 1)
        self.experts, self.hidden = w13[0].shape[0], 2 * w13[0].shape[2]
        self.first, self.second = _layer(*w13, scales), _layer(weights["w2"], weights["w2_scale"], scales)

    def call(self, x: Tensor, ids: Tensor, weights: Tensor, form: str) -> Callable[[], Tensor]:
        """Return a call that computes bf16 [T, H] from x bf16 [T, H], ids and weights [T, topk]."""
        from humming.forward import may_process_input

        tokens, topk = ids.shape
        order = ids.flatten().argsort(stable=True)
        by_number = form == "indexed"
        row_of_slot = torch.empty_like(order)
        row_of_slot[order] = torch.arange(order.numel(), device=x.device)
        rows = torch.arange(order.numel(), device=x.device) if by_number else row_of_slot
        to, given = rows.int(), weights.float().contiguous()
        ends = torch.bincount(ids.flatten(), minlength=self.experts).cumsum(0)
        starts = torch.nn.functional.pad(ends, (1, 0))
        more = {} if by_number else dict(layout="scatter", scatter_idx=to.view(tokens, topk))
        products = [_Product(layer, tokens * topk, form) for layer in (self.first, self.second)]
        places = [product.places(order, starts) for product in products]
        out = torch.empty_like(x)

        def call() -> Tensor:
            codes, groups, whole = may_process_input(self.first.humming_config, x, **more)
            y = products[0](codes, whole if groups is None else groups, places[0], topk if by_number else 1)
            codes, groups, whole = may_process_input(
                self.second.humming_config, y, activation_type="binary_split", activation_impl=ACTIVATION
            )
            y = products[1](codes, whole if groups is None else groups, places[1], 1)
            grid = (tokens, -(-self.hidden // 1024))
            weighted_sum[grid](y, to, given, out, WIDTH=self.hidden, TOPK=topk, COLUMNS=1024, num_warps=4)
            return out

        return call


class _Product:
    """One matrix, with the kernel that Humming's heuristics choose for this number of rows."""

    def __init__(self, layer: Any, rows: int, form: str) -> None:
        from humming.tune import get_heuristics_config

        self.layer, self.form = layer, form
        self.tuning = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=form)

    def places(self, order: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """Return what names the rows of each expert: where they begin, or the slots of every block."""
        if self.form == "grouped_contiguous":
            return dict(expert_layout=starts)
        block = self.tuning["block_shape"][0]
        slots, owners = [], []
        edges = starts.tolist()
        for expert, (begin, end) in enumerate(zip(edges, edges[1:])):
            blocks = -(-(end - begin) // block)
            slots.append(torch.nn.functional.pad(order[begin:end], (0, blocks * block - end + begin), value=edges[-1]))
            owners += [expert] * blocks
        ids = torch.cat(slots).int()
        count = torch.tensor(ids.numel(), dtype=torch.int32, device=ids.device)
        experts = torch.tensor(owners, dtype=torch.int32, device=ids.device)
        return dict(sorted_ids=ids, expert_ids=experts, num_tokens_padded=count)

    def __call__(self, codes: Tensor, scales: Tensor, places: dict[str, Tensor], topk: int) -> Tensor:
        return self.layer(
            codes,
            input_scale=scales,
            top_k=topk,
            compute_config={"gemm_type": self.form},
            tuning_config=self.tuning,
            **places,
        )


def _layer(codes: Tensor, scales: Tensor, group: int) -> Any:
    """Make a layer from codes uint8 [E, N, K / 2], scales uint8 [E, N, K / 32]."""
    from humming.layer import HummingLayer

    with torch.device(codes.device):
        layer = HummingLayer(
            shape_n=codes.shape[1],
            shape_k=2 * codes.shape[2],
            weight_config={"quant_method": "mxfp4"},
            input_config={"quant_method": "humming", "dtype": "float8e4m3", "group_size": group},
            num_experts=codes.shape[0],
            torch_dtype=torch.bfloat16,
        )
    layer.load_from_tensors({"weight": codes, "weight_scale": scales})
    layer.transform()
    return layer
