"""torch's scaled_dot_product_attention on dsv4, compared with torch's own."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import dsv4
from dsv4.integrations import sdpa
from dsv4.integrations.sdpa import scaled_dot_product_attention


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("tokens, keys, causal", [(5, 9, False), *itertools.product((5, 9), (5, 9), (True,))])
@pytest.mark.parametrize("d, d_v, scale", [(64, 64, None), (80, 40, None), (72, 72, 0.3)])
def test_results_and_gradients_are_those_of_torch(tokens, keys, causal, d, d_v, scale):
    given = tensors((2, 4, tokens, d), (2, 4, keys, d), (2, 4, keys, d_v))
    options = dict(is_causal=causal, scale=scale)
    got, wanted = (f(*given, **options) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(got, wanted)
    dout = torch.randn(wanted.shape)
    for ours, theirs in zip(*(torch.autograd.grad(out, given, dout) for out in (got, wanted))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shapes, gqa",
    [
        (((4, 3, 64), (4, 5, 64), (4, 5, 64)), False),  # no batch
        (((2, 3, 4, 5, 64), (2, 3, 4, 6, 64), (2, 3, 4, 6, 64)), False),  # two batch dims
        (((2, 6, 3, 64), (2, 2, 5, 64), (2, 2, 5, 64)), True),
        (((2, 6, 3, 64), (2, 1, 5, 64), (2, 1, 5, 64)), False),  # one KV head is broadcast
        (((2, 4, 3, 64), (1, 4, 5, 64), (1, 4, 5, 64)), False),  # so is one sequence
    ],
)
def test_shapes_of_torch(shapes, gqa):
    given = tensors(*shapes)
    got = scaled_dot_product_attention(*given, enable_gqa=gqa)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(*given, enable_gqa=gqa))


def test_views_of_one_projection_are_not_copied(monkeypatch):
    """The views are those of a model: [batch, tokens, heads, head dim] transposed."""
    seen = []
    monkeypatch.setattr(sdpa, "fmha", lambda *qkv, **options: seen.extend(qkv) or dsv4.fmha(*qkv, **options))
    made = torch.randn(2, 7, 3, 4, 64)
    q, k, v = (made[:, :, n].transpose(1, 2) for n in range(3))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert [x.untyped_storage().data_ptr() for x in seen] == [made.untyped_storage().data_ptr()] * 3


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(attn_mask=torch.ones(3, 3, dtype=torch.bool)), "^attn_mask: got bool .*is_causal=True"),
        (dict(dropout_p=0.1), "^dropout_p: got float 0.1; accepted: 0.0"),
        (dict(key=torch.zeros(1, 2, 3, 64)), "^enable_gqa: got False with 4 query heads on 2 KV heads; accepted: True"),
        (dict(query=torch.zeros(1, 4, 3, 600)), "^query: got head dim 600; accepted: a head dim from 1 to 512"),
        (
            dict(query=torch.zeros(3, 4, 3, 64), key=torch.zeros(2, 4, 3, 64)),
            "^key: got batch .2.; .*broadcasts with .3., as",
        ),
        (
            dict(key=torch.zeros(3, 4, 3, 64), value=torch.zeros(2, 4, 3, 64)),
            "^value: got batch .2.; .*with .3., as key",
        ),
        (dict(value=torch.zeros(1, 4, 3, 64).to_sparse()), "^value: got layout torch.sparse_coo"),
        (dict(query=torch.zeros(3, 64)), "^query: got float32 .*accepted: a tensor .*heads, tokens"),
        (dict(query=torch.zeros(1, 4, 3, 64, dtype=torch.float64)), "^query: got dtype torch.float64"),
        (dict(key=torch.zeros(1, 4, 3, 64, dtype=torch.bfloat16)), "^key: got"),
        (dict(scale="1"), "^scale: got str"),
        (dict(is_causal=1), "^is_causal: got int 1"),
    ],
)
def test_what_dsv4_does_not_compute_is_named(change, says):
    x = torch.zeros(1, 4, 3, 64)
    with pytest.raises(ValueError, match=says):
        scaled_dot_product_attention(**dict(query=x, key=x, value=x) | change)


def test_within_replaced_libraries_use_dsv4_and_the_rest_runs_in_torch():
    sdpa.calls.clear()
    sdpa._told.clear()
    layer = torch.nn.TransformerEncoderLayer(64, 1, dropout=0.0, batch_first=True)  # calls F.sdpa in training mode
    x = torch.randn(2, 5, 64)
    wanted = layer(x)
    q, mask = torch.randn(1, 2, 3, 64), torch.ones(3, 3, dtype=torch.bool).tril()
    theirs = F.scaled_dot_product_attention(q, q, q, mask)
    with sdpa.replaced(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(layer(x), wanted)
        assert sdpa.calls == {"dsv4": 1} and not told
        for _ in range(2):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, mask), theirs)
        F.scaled_dot_product_attention(q, q, q, torch.ones(1, 3))  # another line, another shape: the same reason
    assert sdpa.calls == {"dsv4": 1, "torch": 3}
    (warning,) = told
    assert "computed by torch: attn_mask: got bool" in str(warning.message)
    assert F.scaled_dot_product_attention is sdpa.TORCH


def test_a_training_step_under_ddp_and_fsdp(tmp_path):
    """On one rank, gradients arrive at both wrappers' parameters and equal those of torch's attention."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.qkv, self.out = torch.nn.Linear(64, 3 * 128), torch.nn.Linear(128, 64)

        def forward(self, x, attend):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4)
            return self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, found = torch.randn(2, 7, 64), []
        for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
            for attend in (scaled_dot_product_attention, F.scaled_dot_product_attention):
                model = wrap(Layer())
                model(x, attend).square().sum().backward()
                whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
                found.append(torch.cat([g.flatten() for g in whole]))
        for one in found[1:]:
            torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float32, torch.bfloat16)])
def test_autocast_casts_as_for_torchs_function(dtypes):
    """Where RoPE is computed in fp32, query and key have another dtype than value."""
    given = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(tensors(*[(2, 4, 9, 64)] * 3), dtypes)]

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(*x):
        return scaled_dot_product_attention(*x, is_causal=True)

    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(*given, is_causal=True)
        outs = [f(*given, is_causal=True) for f in (scaled_dot_product_attention, sdpa._either)]
        outs.append(compiled(*given))
    for out in outs:
        assert out.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)
        for x, grad in zip(given, torch.autograd.grad(out.float().sum(), given)):
            assert grad.dtype == x.dtype


@pytest.mark.parametrize("lead, tokens", [((2,), 0), ((0,), 3), ((2, 0), 3), ((), 0)])
def test_no_queries(lead, tokens):
    q, k = torch.randn(*lead, 4, tokens, 64, requires_grad=True), torch.randn(*lead, 4, 7, 64)
    out = scaled_dot_product_attention(q, k, k, is_causal=True)
    assert out.shape == q.shape and not out.numel()
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
