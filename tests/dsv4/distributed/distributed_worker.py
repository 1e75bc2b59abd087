"""The ranks of the tests of dsv4.distributed: python distributed_worker.py SIZE FOLDER [CHECK].

Every check compares with the oracle on the unsharded tensors, which each rank draws from the same seed. The verdicts
are written to FOLDER/RANK.json: check -> "" or what was wrong. Every check has a process group of its own, so that a
rank that fails ends the check for the others and no other check. Rank 0 fails in CHECK, to show that.

bf16 attention is that of the coarsest CPU: products in bf16, and an LSE that is off as with AVX2 and AVX-512, where
torch takes a faster exp for 16-bit types (pytorch#151441).
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401  else each rank imports it, and sympy, with its first gradient
from agreement import FP32_BOUND, assert_agrees, assert_lse, assert_right, relative
from dsink import assert_dsink

import dsv4
from dsv4 import reference
from dsv4.distributed import decode, local_lengths, local_rows, merge, positions, prefill, shard, unshard
from dsv4.distributed.ranks import ORDERS, gather
from dsv4.fmha import cpu as cpu_fmha
from dsv4.reference import backward as reference_backward

COARSE = 2.0**-14  # error of that exp, relative, so of the LSE, absolute
FP32 = 3 * FP32_BOUND  # of gradients: P, the weights of partial results and dO . O may each be off by the bound


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_on_all(x):
    """Bit for bit."""
    everywhere = gather(x, None)
    assert all(torch.equal(x, other) for other in everywhere)


def check_shards_come_together_again(rank, size):
    for order in ("zigzag", "contiguous"):
        for dtype in (torch.float32, torch.bfloat16):
            x = normal(2, 4 * size, 3, dtype=dtype)
            mine = shard(x, order=order)
            assert mine.shape == (2, 4, 3)
            assert torch.equal(mine, x[:, positions(4 * size, order=order)])
            assert torch.equal(unshard(mine, order=order), x)
        rows = normal(8 * size, 5)
        assert torch.equal(unshard(shard(rows, 0, order=order), 0, order=order), rows)
    assert positions(4 * size).tolist() == [2 * rank, 2 * rank + 1, *(2 * (2 * size - 1 - rank) + i for i in (0, 1))]


def check_decode_of_a_paged_cache(rank, size):
    """Pages go round the ranks; the last sequence is shorter than a page, so ranks are without keys."""
    page, heads, kv_heads, d = 4, 6, 2, 64
    lengths = torch.tensor([37, 11, 3, 0], dtype=torch.int32)
    pages = -(-40 // (page * size)) * size  # of a sequence
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (
            normal(*s, seed=i, dtype=dtype)
            for i, s in enumerate([(4, 1, heads, d), (4 * pages, page, kv_heads, d), (4 * pages, page, kv_heads, d)])
        )
        table = torch.arange(4 * pages, dtype=torch.int32).view(4, pages)
        sink = torch.linspace(-1, 1, heads)
        local = local_lengths(lengths, block=page)
        mine = table[:, rank::size].contiguous()
        got, lse = decode(dsv4.fmha_paged, q, k, v, mine, local, sink=sink, return_lse=True)
        assert_agrees((got, lse), reference.fmha_paged, q, k, v, table, lengths, sink=sink, merged=True)
        same_on_all(got)
        same_on_all(lse)
        assert not got[3].any()
        assert torch.equal(decode(dsv4.fmha_paged, q, k, v, mine, local, sink=sink), got)


def check_a_share_of_the_heads(rank, size):
    """The same bits as those heads have when every rank gets all."""
    h = 2 * size
    mine, sink = slice(2 * rank, 2 * rank + 2), torch.linspace(-1, 1, h)
    q, k, v = (normal(2, n, heads, 64, seed=rank, dtype=torch.bfloat16) for n, heads in ((3, h), (5, 2), (5, 2)))
    dist.broadcast(q, 0)
    out, lse = decode(dsv4.fmha, q, k, v, sink=sink, return_lse=True)
    some, some_lse = decode(dsv4.fmha, q, k, v, sink=sink, return_lse=True, heads="mine")
    assert torch.equal(some, out[:, :, mine]) and torch.equal(some_lse, lse[:, mine])
    rows, lists = normal(9, 64, seed=rank), normal(4, 9, seed=7).topk(5).indices.int()
    queries = normal(4, h, 64)
    out, lse = decode(dsv4.v4_attention, queries, rows, lists, return_lse=True)
    some, some_lse = decode(dsv4.v4_attention, queries, rows, lists, return_lse=True, heads="mine")
    assert torch.equal(some, out[:, mine]) and torch.equal(some_lse, lse[:, mine])


def check_decode_of_a_v4_layer(rank, size):
    """Window rows and compressed rows dealt out over the ranks; FP8 and bf16 rows, lists and a block table."""
    n, heads, page = 3, 4, 2
    positions_ = torch.tensor([70, 71, 5], dtype=torch.int32)
    q = normal(n, heads, 512, dtype=torch.bfloat16)
    window, compressed = normal(24 * size, 512, seed=1), normal(8 * page * size, 512, seed=2)
    listed = (positions_[:, None] % (24 * size) - torch.arange(16)).clamp_min(-1).int()
    chosen = normal(n, 8 * page * size, seed=3).topk(8).indices.int()
    table = torch.arange(8 * size, dtype=torch.int32)[None].expand(n, -1)
    lengths = torch.tensor([8 * page * size, 3, 0], dtype=torch.int32)
    sink, rope = torch.linspace(-1, 1, heads), (reference.rope_table(100), positions_)
    own_window = torch.arange(24 * size).view(-1, 4)[rank::size].flatten()
    own_compressed = torch.arange(8 * page * size).view(-1, page)[rank::size].flatten()
    for fp8 in (False, True):

        def pool(x, rows, fp8=fp8):
            return dsv4.Fp8Cache.pack(x, rows_per_page=rows) if fp8 else x.bfloat16().view(-1, rows, 512)

        whole = pool(window, 4), pool(compressed, page)
        mine = pool(window[own_window], 4), pool(compressed[own_compressed], page)
        common = dict(inverse_rope=rope)
        for kind in ("swa", "csa", "hca"):
            full, part = [q, whole[0], listed], [q, mine[0], local_rows(listed, block=4)]
            more, less = dict(common), dict(common)
            if kind == "csa":
                full += [whole[1], chosen]
                part += [mine[1], local_rows(chosen, block=page)]
            elif kind == "hca":
                full, part = full + [whole[1]], part + [mine[1]]
                more |= dict(compressed_block_table=table.contiguous(), compressed_lengths=lengths)
                own = torch.arange(8, dtype=torch.int32)[None].expand(n, -1).contiguous()
                less |= dict(compressed_block_table=own, compressed_lengths=local_lengths(lengths, block=page))
            got, lse = decode(dsv4.v4_attention, *part, sink=sink, return_lse=True, **less)
            assert_agrees((got, lse), reference.v4_attention, *full, sink=sink, **more, merged=True)
            same_on_all(got)


def check_rows_are_dealt_out(rank, size):
    for block in (1, 3):
        rows = torch.arange(40)
        mine = local_rows(rows, block=block)
        for length in (0, 1, 7, 20, 40):
            kept = mine[:length][mine[:length] >= 0]
            assert kept.tolist() == list(range(int(local_lengths(torch.tensor([length]), block=block))))
        assert torch.equal(sum(gather((mine >= 0).int(), None)), torch.ones(40).int())
    assert local_rows(torch.tensor([[-1, -1]])).tolist() == [[-1, -1]]


def check_prefill(rank, size):
    """Causal, windows across pieces, no mask; both orders and methods; k and v one tensor."""
    for dtype, tokens, window, causal in (
        (torch.float32, 8 * size, (-1, -1), True),
        (torch.bfloat16, 8 * size, (-1, -1), True),
        (torch.float32, 8 * size, (-1, -1), False),
        (torch.float32, 8 * size, (2, 0), True),
        (torch.float32, 8 * size, (5, 3), False),
        (torch.float32, 2 * size, (0, 1), False),
        (torch.float32, 0, (-1, -1), True),
    ):
        q = normal(2, tokens, 4, 64, dtype=dtype)
        k = normal(2, tokens, 2, 64, seed=1, dtype=dtype)
        v = normal(2, tokens, 2, 64, seed=2, dtype=dtype)
        sink = torch.linspace(-1, 1, 4)
        options = dict(causal=causal, window=window, sink=sink)
        for one_tensor in (False, True):
            v = k if one_tensor else v
            want, want_lse = reference.fmha(q, k, v, **options)
            low, _ = reference.fmha(q, k, v, **options, p_dtype=dtype)
            for order in ("zigzag", "contiguous"):
                mine_k = shard(k, order=order)
                mine = [shard(q, order=order), mine_k, mine_k if one_tensor else shard(v, order=order)]
                before = [x.clone() for x in mine]
                for method in ("ring", "gather"):
                    out, lse = prefill(*mine, order=order, method=method, return_lse=True, **options)
                    assert_right(out, shard(want, order=order), shard(low, order=order), merged=True)
                    assert_lse(lse, shard(want_lse, 2, order=order))
                    assert all(map(torch.equal, mine, before))  # the ring receives into memory of its own


def check_prefill_gradients(rank, size):
    """Gradients of the sum of all ranks' losses agree with the formulas on the whole sequence; dsink is summed."""
    for dtype, tokens, window, causal, use_lse in (
        (torch.float32, 8 * size, (-1, -1), True, True),
        (torch.bfloat16, 8 * size, (-1, -1), True, False),
        (torch.float32, 4 * size, (-1, -1), False, False),
        (torch.float32, 8 * size, (5, 3), False, True),
        (torch.float32, 8 * size, (2, 0), True, False),
    ):
        q, dout = (normal(2, tokens, 4, 64, seed=n, dtype=dtype) for n in (0, 3))
        k, v = (normal(2, tokens, 2, 64, seed=n, dtype=dtype) for n in (1, 2))
        dlse = normal(2, 4, tokens, seed=4) if use_lse else None
        sink = torch.linspace(-1, 1, 4)
        options = dict(causal=causal, window=window, sink=sink)
        want = reference_backward.fmha(q, k, v, dout, dlse, **options)
        low = reference_backward.fmha(q, k, v, dout, dlse, p_dtype=dtype, **options)
        for order in ("zigzag", "contiguous"):
            for method in ("ring", "gather"):
                mine = [shard(x, order=order).requires_grad_() for x in (q, k, v)]
                own_sink = sink.clone().requires_grad_()
                out, lse = prefill(*mine, order=order, method=method, return_lse=True, **options | {"sink": own_sink})
                results = [out] if dlse is None else [out, lse]
                given = [shard(dout, order=order)] + ([] if dlse is None else [shard(dlse, 2, order=order)])
                *got, dsink = torch.autograd.grad(results, [*mine, own_sink], given)
                for name, x in zip("qkv", got):
                    assert x.dtype == dtype
                    gradient_is_right(unshard(x, order=order), getattr(want, name), getattr(low, name))
                dist.all_reduce(dsink)
                if dtype == torch.float32:
                    assert float((dsink - want.sink).norm() / want.sink.norm()) < 2 * FP32  # of dO . O, another sum
                else:
                    whole_out, whole_lse = unshard(out, order=order), unshard(lse, 2, order=order)
                    assert_dsink(dsink, want.sink, whole_out, dout, whole_lse.transpose(1, 2), sink)


def gradient_is_right(got, want, low):
    """16 bits: the rounding of P, dS and the result, and of every partial once more."""
    error = relative(got.double() - want, want)
    bound = FP32
    if got.dtype != torch.float32:
        rounded = low.to(got.dtype).double()
        bound = 1.5 * (relative(rounded - want, want) + relative(want.to(got.dtype).double() - want, want))
    assert error <= bound, f"off by {error:.2e}, allowed {bound:.2e}"


def check_gradients_of_one_tensor_and_of_some(rank, size):
    """k and v one tensor: both gradients in one. Only dk is asked for: the others are not made."""
    q, k, dout = (normal(1, 4 * size, h, 64, seed=h + n) for n, h in enumerate((2, 1, 2)))
    want = reference_backward.fmha(q, k, k, dout, causal=True)
    for method in ("ring", "gather"):
        mine = shard(k).requires_grad_()
        prefill(shard(q), mine, mine, method=method).backward(shard(dout))
        whole = want.k + want.v
        assert float((unshard(mine.grad).double() - whole).norm() / whole.norm()) < FP32
        again = shard(k).requires_grad_()
        prefill(shard(q), again, mine.detach(), method=method).backward(shard(dout))
        assert float((unshard(again.grad).double() - want.k).norm() / want.k.norm()) < FP32


def check_gradients_of_rows_brought_together(rank, size):
    """In DeepSeek-V4 a rank's rows get the sum of the gradients from the queries of all ranks."""
    tokens = 8 * size
    q, rows, dout = normal(tokens, 2, 512), normal(tokens, 512, seed=1), normal(tokens, 2, 512, seed=2)

    def lists(at):
        return (at[:, None] - torch.arange(6)).clamp_min(-1).int()

    want = reference_backward.v4_attention(q, rows, lists(torch.arange(tokens)), dout=dout)
    mine_q, mine = shard(q, 0).requires_grad_(), shard(rows, 0).requires_grad_()
    dsv4.v4_attention(mine_q, unshard(mine, 0), lists(positions(tokens))).backward(shard(dout, 0))
    for got, right in ((mine_q.grad, want.q), (mine.grad, want.window)):
        assert float((unshard(got, 0).double() - right).norm() / right.norm()) < FP32


def check_what_has_no_gradient_says_so(rank, size):
    q, k, v = (normal(1, 4, size, 64, seed=n) for n in range(3))
    says("out", lambda: decode(dsv4.fmha, q.clone().requires_grad_(), k, v))
    x = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(prefill(x, k, v).sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except NotImplementedError as error:
        assert "dsv4.distributed.prefill: double backward" in str(error)
    else:
        raise AssertionError("a second derivative of prefill")


def check_gathered_prefill_bit_for_bit(rank, size):
    """A piece of queries is one fmha call with the keys up to its end."""
    q, k, v = (normal(1, 16 * size, h, 64, seed=h, dtype=torch.bfloat16) for h in (4, 2, 2))
    got = prefill(shard(q), shard(k), shard(v), method="gather")
    for part, n in zip(got.chunk(2, 1), (rank, 2 * size - 1 - rank)):
        begin, end = n * 8, n * 8 + 8
        assert torch.equal(part, dsv4.fmha(q[:, begin:end], k[:, :end], v[:, :end], causal=True))


def check_v4_prefill(rank, size):
    """Rows are few: brought together, the rank's queries see them by lists for their positions; bit for bit."""
    tokens = 16 * size
    q, rows = normal(tokens, 4, 512, dtype=torch.bfloat16), normal(tokens, 512, seed=1, dtype=torch.bfloat16)

    def lists(at):
        return (at[:, None] - torch.arange(8)).clamp_min(-1).int()

    want = dsv4.v4_attention(q, rows, lists(torch.arange(tokens)), deterministic=True)
    got = dsv4.v4_attention(shard(q, 0), unshard(shard(rows, 0), 0), lists(positions(tokens)), deterministic=True)
    assert torch.equal(got, shard(want, 0))


def check_groups(rank, size):
    """Ranks are those of a group, not of the world: groups of one, and the world in reverse."""
    alone = [dist.new_group([n]) for n in range(size)][rank]
    q, k, v = (normal(1, 8, 2, 64, seed=n) for n in range(3))
    sink = torch.zeros(2)
    want, _ = reference.fmha(q, k, v, causal=True, sink=sink)
    for order in ORDERS:
        assert_right(prefill(q, k, v, sink=sink, group=alone, order=order), want, merged=True)
    assert_right(decode(dsv4.fmha, q, k, v, group=alone), reference.fmha(q, k, v)[0])
    other = [dist.new_group([n]) for n in range(size)][(rank + 1) % size]
    says("group", lambda: merge(q, q[..., 0].transpose(1, 2), group=other))
    everybody = dist.new_group(list(range(size)))
    whole = [normal(1, 4 * size, 2, 64, seed=n) for n in range(3)]
    got = prefill(*(shard(x, group=everybody) for x in whole), group=everybody)
    assert_right(got, shard(reference.fmha(*whole, causal=True)[0]), merged=True)


def says(name, call):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(f"{name}: got "), error
    else:
        raise AssertionError(f"nothing was said about {name}")


def check_errors(rank, size):
    """No rank gets as far as sending anything."""
    q, k, v = (normal(1, 4, 2, 64, seed=n) for n in range(3))
    says("order", lambda: prefill(q, k, v, order="round"))
    says("order", lambda: prefill(q[:, :3], k[:, :3], v[:, :3]))
    says("method", lambda: prefill(q, k, v, method="tree"))
    says("k", lambda: prefill(q, k[:, :2], v[:, :2]))
    says("window", lambda: prefill(q, k, v, window=(-3, 0)))
    says("sink", lambda: prefill(q, k, v, sink=torch.zeros(3)))
    says("length", lambda: positions(2 * size + 1))
    says("causal", lambda: decode(dsv4.fmha, q, k, v, causal=True))
    says("window", lambda: decode(dsv4.fmha, q, k, v, window=(3, 0)))
    says("out", lambda: decode(dsv4.fmha, q, k, v, out=q.clone()))
    says("heads", lambda: decode(dsv4.fmha, q, k, v, heads="some"))
    one = normal(1, 1, 1, 64)
    if size > 1:
        says("out", lambda: decode(dsv4.fmha, one, one, one, heads="mine"))
    says(
        "sink",
        lambda: decode(dsv4.fmha, *[x.expand(1, 4, size, 64) for x in (one,) * 3], sink=torch.zeros(7), heads="mine"),
    )
    says("block", lambda: local_rows(torch.zeros(1).int(), block=0))
    says("indices", lambda: local_rows(torch.zeros(1)))
    says("lengths", lambda: local_lengths(3))


def check_ranks_with_different_shapes(rank, size):
    """All of them raise; none is left waiting."""
    if size == 1:
        return
    some = normal(1, 4 + 2 * (rank == 0), 2, 64)
    says("k", lambda: prefill(some, some, some))
    says("x", lambda: prefill(some, some, some, method="gather"))
    says("out", lambda: decode(dsv4.fmha, some, some, some))
    heads = normal(1, 4, size * (1 + (rank == 0)), 64)
    says("out", lambda: decode(dsv4.fmha, heads, heads, heads, heads="mine"))
    says("x", lambda: unshard(some.bfloat16() if rank else some))
    same = torch.zeros(1, 4, 2)
    says("x", lambda: unshard(same.long() if rank == 1 else same.int()))  # dtypes that attention does not have
    says("x", lambda: unshard(same[..., None] if rank == 1 else same))
    many = torch.zeros(1, 4, 1, 1, 1, 1, 2 + (rank == 1))
    says("x", lambda: unshard(many))
    says("x", lambda: unshard(many.requires_grad_()))
    for method, name in (("ring", "v"), ("gather", "x")):  # only v differs
        q = normal(1, 4, 2, 64, dtype=torch.bfloat16)
        k, v = q.clone(), normal(1, 4, 1 + (rank == 1), 64, dtype=torch.bfloat16)
        says(name, lambda q=q, k=k, v=v, method=method: prefill(q, k, v, method=method))


CHECKS = sorted(name for name in globals() if name.startswith("check_"))


def as_on_the_coarsest_cpu():
    flash = cpu_fmha._flash

    def coarse(q, *args, **options):
        out, lse = flash(q, *args, **options)
        if q.dtype == torch.bfloat16:
            lse = lse + COARSE * torch.arange(lse.numel()).view(lse.shape).cos()
        return out, lse

    cpu_fmha._flash = coarse
    cpu_fmha.native = lambda dtype: True


def main(rank, size, folder, failing=None):
    torch.set_num_threads(1)
    as_on_the_coarsest_cpu()
    verdicts = {}
    for name in CHECKS:
        store = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
        dist.barrier()  # else a rank may be through and gone while another still connects
        try:
            assert rank or name != failing, "as asked"
            globals()[name](rank, size)
            verdicts[name] = ""
        except Exception:
            verdicts[name] = traceback.format_exc()
        dist.destroy_process_group()  # a rank that still waits for this one is told
        (Path(folder) / f"{rank}.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    size, folder, *failing = sys.argv[1:]
    for rank in range(int(size)):  # forked, because importing torch takes longer than all checks; it has no threads yet
        if os.fork() == 0:
            main(rank, int(size), folder, *failing)
            os._exit(0)
    sys.exit(any([os.wait()[1] for _ in range(int(size))]))
