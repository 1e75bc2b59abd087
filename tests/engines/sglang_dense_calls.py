"""Calls of dsv4's dense backend for SGLang compared with the oracle, on a CPU: python sglang_dense_calls.py

The pool, the request and the layer are stubs; the backend and what it imports of SGLang are real. Head dims, windows,
sinks in bf16 as gpt-oss has them, decode and extend, keys shared by two heads each; unwritten pages are NaN.
"""

from types import SimpleNamespace

import sglang_run  # noqa: F401  stand-ins, before SGLang is imported
import torch
from agreement import assert_right

from dsv4 import reference

PAGE, LENGTHS, NEW = 16, (20, 3, 37), {"decode": (1, 1, 1), "extend": (4, 3, 30)}


def main() -> None:
    for d in (64, 128, 256, 512):
        for window in (-1, 6):  # SGLang does not count the query itself
            for mode in NEW:
                for with_sinks in (False, True):
                    compare(mode, d, window, with_sinks)
    print("all agree")


def compare(mode: str, d: int, window: int, with_sinks: bool) -> None:
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dsv4.integrations.sglang.dense import Backend

    chance = torch.Generator().manual_seed(0)
    table = torch.tensor([[5, 2, 0], [7, 0, 0], [1, 8, 3]])
    places = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    lengths, new = torch.tensor(LENGTHS), torch.tensor(NEW[mode])
    rows = (int(new.sum()), 4), (int(lengths.sum()), 2), (int(lengths.sum()), 2)
    q, k, v = (torch.randn(n, heads, d, generator=chance) for n, heads in rows)
    sinks = torch.randn(4, generator=chance).bfloat16() if with_sinks else None
    keys, values = (torch.full((9 * PAGE, 2, d), float("nan")) for _ in range(2))
    slots = torch.cat([places[r, :n] for r, n in enumerate(LENGTHS)]).long()
    keys[slots], values[slots] = k, v
    pool = SimpleNamespace(dtype=torch.float32, get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)
    backend = Backend(
        SimpleNamespace(
            use_mla_backend=False,
            model_config=SimpleNamespace(is_encoder_decoder=False, context_len=48),
            server_args=SimpleNamespace(speculative_algorithm=None),
            token_to_kv_pool=pool,
            page_size=PAGE,
            req_to_token_pool=SimpleNamespace(req_to_token=places),
        )
    )
    batch = SimpleNamespace(
        batch_size=3, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=torch.arange(3), spec_info=None,
        extend_seq_lens=new, extend_seq_lens_cpu=new.tolist(), forward_mode=ForwardMode[mode.upper()],
    )  # fmt: skip
    layer = SimpleNamespace(
        tp_q_head_num=4, head_dim=d, v_head_dim=d, layer_id=0, sliding_window_size=window, scaling=d**-0.5,
        logit_cap=0, is_cross_attention=False, attn_type=AttentionType.DECODER,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode == "decode" else backend.forward_extend
    out = forward(q.flatten(1), None, None, layer, batch, sinks=sinks)
    starts, ends = (torch.nn.functional.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in (new, lengths))
    sink = None if sinks is None else sinks.float()
    wanted, _ = reference.fmha_varlen(q, k, v, starts, ends, causal=True, window=(window, 0), sink=sink)
    assert_right(out.view_as(q), wanted)


if __name__ == "__main__":
    main()
