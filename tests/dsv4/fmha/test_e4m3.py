"""k and v in e4m3 with scales, as FP8 caches have them: what is computed, what is accepted, what torch sees."""

import pytest
import torch
from agreement import assert_agrees, assert_right

import dsv4
from dsv4 import reference, suites
from dsv4.runtime import warmup

E4M3 = torch.float8_e4m3fn
CASES = {str(case): case for case in suites.select("fmha", match="e4m3")}


def drawn(b=2, t=3, s=40, hq=4, hkv=2, d=64, dtype=torch.float32):
    q = torch.randn(b, t, hq, d).to(dtype)
    k, v = (torch.randn(b, s, hkv, d).to(E4M3) for _ in "kv")
    return q, k, v


def by_hand(q, k, v, k_scale, v_scale):
    """Attention in fp64, with nothing of dsv4 in it."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double() * by.double().expand(x.shape[2])[:, None] for x, by in ((k, k_scale), (v, v_scale)))
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    s = q.double().transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1)


@pytest.mark.parametrize("scales", [((), ()), ((1,), ()), ((2,), (2,))], ids=str)
def test_the_reference_multiplies_by_the_scales(scales):
    q, k, v = drawn()
    k_scale, v_scale = (torch.rand(shape) + 0.5 for shape in scales)
    for x, y in zip(reference.fmha(q, k, v, k_scale=k_scale, v_scale=v_scale), by_hand(q, k, v, k_scale, v_scale)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_computes_the_cases(name):
    result = suites.run_case(CASES[name], suites.Where("cpu"), 3)
    assert result.ok, result.why()


def test_every_code_counts():
    """There is one key of every finite code, and values of every finite code: both are reproduced exactly."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    every = every[every.float().isfinite()]
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1
    k, v = (torch.zeros(1, len(every), 1, 64).to(E4M3) for _ in "kv")
    k[0, :, 0, 0] = every
    v[0, :, 0, 1] = every
    scale = torch.tensor(0.01)
    got = dsv4.fmha(q, k, v, k_scale=scale, v_scale=scale, softmax_scale=1.0, return_lse=True)
    assert_agrees(got, reference.fmha, q, k, v, k_scale=scale, v_scale=scale, softmax_scale=1.0)


def test_no_scale_is_1_and_a_scale_for_a_head_may_be_strided():
    q, k, v = drawn()
    one = torch.ones(())
    assert torch.equal(dsv4.fmha(q, k, v), dsv4.fmha(q, k, v, k_scale=one, v_scale=one))
    assert torch.equal(dsv4.fmha(q, k, v), dsv4.fmha(q, k.float(), v.float()))
    apart = torch.rand(2, 3)[:, 1]
    assert torch.equal(dsv4.fmha(q, k, v, k_scale=apart), dsv4.fmha(q, k, v, k_scale=apart.clone()))


def test_other_head_dims_are_padded():
    q, k, v = drawn(d=72)
    scales = dict(k_scale=torch.rand(2), v_scale=torch.tensor(0.3))
    out = dsv4.fmha(q, k, v[..., :40], **scales)
    assert_right(out, reference.fmha(q, k, v[..., :40], **scales)[0])


def test_scales_and_dtypes_are_refused_by_name():
    q, k, v = drawn()
    two = torch.ones(2)
    for name in ("k_scale", "v_scale"):
        for wrong, said in [
            (torch.ones(3), r"got float32 \[3\] on cpu; accepted: None, or a tensor of one number or of 2"),
            (1.0, "got float 1.0; accepted: None, or a tensor"),
            (two.double(), "got dtype float64; accepted: float32"),
            (torch.tensor(0.0), "got values from 0.0 to 0.0; accepted: finite numbers > 0"),
            (torch.tensor([1.0, float("nan")]), "got values from nan to nan; accepted: finite numbers > 0"),
        ]:
            with pytest.raises(ValueError, match=f"^{name}: {said}"):
                dsv4.fmha(q, k, v, **{name: wrong})
        with pytest.raises(ValueError, match=f"^{name}: .*accepted: None with k and v in torch.float32"):
            dsv4.fmha(q, k.float(), v.float(), **{name: two})
    with pytest.raises(ValueError, match="^v: got dtype torch.float32; accepted: dtype torch.float8_e4m3fn, as k"):
        dsv4.fmha(q, k, v.float())
    with pytest.raises(ValueError, match="^q: got dtype float8_e4m3fn"):
        dsv4.fmha(q.to(E4M3), k, v)
    with pytest.raises(ValueError, match="^k: got dtype float8_e5m2; accepted: .*float8_e4m3fn"):
        dsv4.fmha(q, k.to(torch.float8_e5m2), v)


def test_there_are_no_gradients():
    q, k, v = drawn()
    said = "^{}: got a tensor that requires grad; accepted: .*this call has no gradient"
    for function in (dsv4.fmha, torch.ops.dsv4.fmha):
        with pytest.raises(ValueError, match=said.format("q")):
            function(q.clone().requires_grad_(), k, v)
    with pytest.raises(ValueError, match=said.format("k_scale")):
        dsv4.fmha(q, k, v, k_scale=torch.ones(2, requires_grad=True))
    with torch.no_grad():
        dsv4.fmha(q.clone().requires_grad_(), k, v)


def test_torch_compile_and_fake_tensors_see_it():
    q, k, v = drawn()
    scale = torch.rand(2)

    def call(q, k, v, scale):
        return dsv4.fmha(q, k, v, k_scale=scale, v_scale=scale, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, scale), call(q, k, v, scale))
    assert call(*(x.to("meta") for x in (q, k, v, scale))).shape == q.shape


def test_warmup_runs_fp8_caches_where_they_are_asked_for():
    sizes = dict(batch=2, q_heads=4, kv_heads=2, head_dim=64, max_seqlen_k=32, device="cpu")
    for fp8, dtype in ((True, E4M3), (False, torch.float32), (None, torch.float32)):
        made = dsv4.warmup(dsv4.fmha_paged, dtype=torch.float32, backend="cpu", fp8=fp8, **sizes)
        kinds = warmup.Kinds(16, (False,), (False, True) if fp8 is None else (fp8,), (False,))
        for tensors, _ in warmup.CALLS["fmha_paged"](made, torch.zeros(2, 1, 4, 64), kinds):
            assert tensors[1].dtype == tensors[2].dtype == dtype
