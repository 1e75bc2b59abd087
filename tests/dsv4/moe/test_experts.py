import moe_cases
import pytest
import torch

import dsv4
from dsv4 import Fp4Experts


@pytest.mark.parametrize("layout", ["sm90", "sm100"])
@pytest.mark.parametrize("nvfp4", [False, True])
def test_the_bytes_of_the_checkpoint_come_back(nvfp4, layout):
    given, experts = moe_cases.layer(e=2, h=512, i=256, nvfp4=nvfp4, layout=layout)
    back = experts.unpack()
    assert back.keys() == given.keys()
    for name, x in given.items():
        assert torch.equal(back[name].contiguous().view(torch.uint8), x.contiguous().view(torch.uint8)), name
    assert (experts.experts, experts.hidden, experts.intermediate) == (2, 512, 256)
    assert experts.format == ("nvfp4" if nvfp4 else "mxfp4")


def test_int8_and_e8m0_as_a_checkpoint_has_them():
    given, experts = moe_cases.layer()
    typed = {n: x.view(torch.float8_e8m0fnu if "scale" in n else torch.int8) for n, x in given.items()}
    assert torch.equal(Fp4Experts.pack(**typed).w13, experts.w13)


def test_layouts():
    """Other tiles, the same numbers; on a CPU the result is the same."""
    given, experts = moe_cases.layer(e=2, nvfp4=True)
    moved = Fp4Experts.pack(**given, layout="sm100")
    assert (experts.layout, moved.layout) == ("sm90", "sm100") and not torch.equal(moved.w13, experts.w13)
    for one, other in zip(experts.dequantize(), moved.dequantize()):
        assert torch.equal(one, other)
    tokens = moe_cases.tokens(3, e=2, k=2)
    assert torch.equal(dsv4.moe(**tokens, experts=moved), dsv4.moe(**tokens, experts=experts))
    with pytest.raises(ValueError, match="^layout: got str 'sm80'; accepted: 'sm90', 'sm100'"):
        Fp4Experts.pack(**given, layout="sm80")


def named(given):
    """Return the weights under the names of a checkpoint."""
    kinds = {"weight": torch.int8, "scale": torch.float8_e8m0fnu}
    return {
        f"layers.3.ffn.experts.{e}.{name}.{kind}": given[name if kind == "weight" else f"{name}_scale"][e].view(dtype)
        for e in range(len(given["w1"]))
        for name in ("w1", "w2", "w3")
        for kind, dtype in kinds.items()
    }


def test_tensors_by_the_names_of_a_checkpoint():
    given, experts = moe_cases.layer()
    tensors = named(given) | {"layers.3.ffn.gate.weight": torch.zeros(4, 256)}
    made = Fp4Experts.from_checkpoint(tensors, "layers.3.ffn.experts.")
    assert torch.equal(made.w13, experts.w13) and torch.equal(made.w2_scales, experts.w2_scales)
    del tensors["layers.3.ffn.experts.2.w3.scale"]
    with pytest.raises(ValueError, match="^tensors: got no layers.3.ffn.experts.2.w3.scale; accepted: "):
        Fp4Experts.from_checkpoint(tensors, "layers.3.ffn.experts.")
    with pytest.raises(ValueError, match="^tensors: got no layers.4.ffn.experts.0.w1.weight; accepted: "):
        Fp4Experts.from_checkpoint(tensors, "layers.4.ffn.experts.")


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("1.w1.weight", lambda x: x.float(), "got dtype float32; accepted: int8, uint8"),
        ("0.w1.weight", lambda x: x.view(torch.float8_e4m3fn), "got dtype float8_e4m3fn; accepted: int8, uint8"),
        ("1.w2.scale", lambda x: x.float(), "got dtype float32; accepted: float8_e8m0fnu, uint8"),
        ("0.w1.weight", lambda x: x[0, 0], r"got shape \[\]; accepted: shape \[rows, bytes\]"),
        ("1.w3.weight", lambda x: x[:64], r"got shape \[64, 128\]; accepted: shape \[128, 128\]"),
        ("1.w3.weight", lambda x: x.to("meta"), "got a tensor on meta"),
    ],
)
def test_what_is_wrong_in_a_checkpoint_is_named(name, change, words):
    """FP8 experts, for one, have as many bytes to an element: they are not read as FP4."""
    tensors = named(moe_cases.layer(e=2)[0])
    name = f"layers.3.ffn.experts.{name}"
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=rf"^tensors\['{name}'\]: {words}"):
        Fp4Experts.from_checkpoint(tensors, "layers.3.ffn.experts.")


@pytest.mark.parametrize("dtype", [None, "float32", torch.int32])
def test_dequantize_names_a_wrong_dtype(dtype):
    with pytest.raises(ValueError, match="^dtype: got .*; accepted: torch.bfloat16, torch.float16, torch.float32"):
        moe_cases.layer(e=1)[1].dequantize(dtype)


@pytest.mark.parametrize("nvfp4", [False, True])
def test_numbers(nvfp4):
    given, experts = moe_cases.layer(e=2, nvfp4=nvfp4)
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    w13, w2 = experts.dequantize(torch.float64)
    for name, got, row, column in (("w1", w13, 3, 77), ("w3", w13, 128 + 3, 200), ("w2", w2, 250, 101)):
        own = row % 128 if name == "w3" else row
        code = int(given[name][1, own, column // 2]) >> 4 * (column % 2) & 15
        scale = given[f"{name}_scale"][1, own, column // (16 if nvfp4 else 32)]
        factor = float(scale) * float(given[f"{name}_global"][1]) if nvfp4 else 2.0 ** (int(scale) - 127)
        assert got[1, row, column].item() == pytest.approx((-1) ** (code >> 3) * values[code & 7] * factor, rel=1e-15)


def test_rows_whose_exponents_spread_are_reported():
    given, _ = moe_cases.layer(e=1, low=120, high=121)
    given["w3_scale"][0, 5, 1] = 120 - 12
    given["w2_scale"][0, 7, 0] = 120 - 15
    found = Fp4Experts.pack(**given).spread
    assert found == (2 * 128 + 256, 15, 2, 1)
    assert "2 rows by more than 11, 1 by more than 14" in str(found)


@pytest.mark.parametrize("name, change, says", [
    ("w1", lambda x: x[:, :100], "I a multiple of 128"), ("w1", lambda x: x[..., :60], "H of 256"),
    ("w1", lambda x: x[0], "a tensor"), ("w3", lambda x: x[:, :-1], "shape"),
    ("w2", lambda x: x.float(), "int8, uint8"),
    ("w2_scale", lambda x: x[..., :-1], "shape"), ("w3_scale", lambda x: x.float(), "float8_e8m0fnu, uint8"),
    ("w1_scale", lambda x: x.index_fill(1, torch.tensor([3]), 255), "0 to 254"),
    ("w1_global", lambda x: torch.ones(4), "None with E8M0"),
])  # fmt: skip
def test_errors_name_the_tensor(name, change, says):
    given = moe_cases.layer().given
    given[name] = change(given.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: got .*; accepted: .*{says}"):
        Fp4Experts.pack(**given)


def test_nvfp4_needs_the_scales_of_tensors():
    given = moe_cases.layer(nvfp4=True).given
    del given["w2_global"]
    with pytest.raises(ValueError, match="^w2_global: got"):
        Fp4Experts.pack(**given)


def test_saved_and_loaded(tmp_path):
    experts = moe_cases.layer().experts
    torch.save(experts, tmp_path / "experts")
    back = torch.load(tmp_path / "experts", weights_only=True)
    assert torch.equal(back.w2_scales, experts.w2_scales) and back.spread == experts.spread
    assert back.to("cpu").nbytes == experts.nbytes


def test_only_the_device_can_change():
    """`to` of a tensor accepts a dtype as well, which would round the codes."""
    experts = moe_cases.layer().experts
    for other in (torch.bfloat16, torch.zeros(1), None, "x"):
        with pytest.raises(ValueError, match="^device: got .*; accepted: a torch.device or its name"):
            experts.to(other)
    assert experts.to("meta").w13.is_meta


def test_repr_has_sizes_not_values():
    assert repr(moe_cases.layer().experts).startswith("Fp4Experts(mxfp4, 4 experts, hidden 256, intermediate 128, ")
