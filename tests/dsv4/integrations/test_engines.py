"""The experts of the engines' plug-ins: parameters as a loader leaves them, calls that are counted, ranks."""

from collections import Counter
from types import SimpleNamespace

import moe_cases
import pytest
import torch

import dsv4
from dsv4.integrations.engines import EngineExperts

NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def layer_of(given, scale=torch.uint8):
    """Return a layer like an engine's: gate above up, int8 codes."""
    layer = SimpleNamespace()
    w13, s13 = (torch.cat([given[f"w1{end}"], given[f"w3{end}"]], 1) for end in ("", "_scale"))
    for name, x in zip(NAMES, (w13, s13, given["w2"], given["w2_scale"])):
        setattr(layer, name, SimpleNamespace(data=x.view(scale if "scale" in name else torch.int8)))
    return layer


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
def test_a_layer_of_an_engine(scale):
    given, tokens = moe_cases.layer().given, moe_cases.tokens(5)
    counted = Counter()
    ours, layer = EngineExperts(counted, 7.0), layer_of(given, scale)
    with pytest.raises(ValueError, match="^experts: got no weights yet"):
        ours(tokens["x"], tokens["ids"], tokens["weights"])
    ours.load(layer, NAMES)
    assert all(getattr(layer, name).data.numel() == 0 for name in NAMES)
    got = ours(tokens["x"], tokens["ids"].long(), tokens["weights"])
    experts = dsv4.Fp4Experts.pack(**given)
    assert torch.equal(got, dsv4.moe(**tokens, experts=experts, limit=7.0))
    assert not torch.equal(got, dsv4.moe(**tokens, experts=experts, limit=0.5))
    assert counted == {"experts": 1}


def test_two_ranks():
    """Each has the experts of its map; what both give adds up to the whole, but for rounding."""
    given, tokens = moe_cases.layer().given, moe_cases.tokens(5)
    whole, parts = EngineExperts(Counter(), None), []
    whole.load(layer_of(given), NAMES)
    for rank in range(2):
        mine = {name: x[2 * rank : 2 * rank + 2] for name, x in given.items()}
        place = torch.full((4,), -1, dtype=torch.int32)
        place[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        one = EngineExperts(Counter(), None)
        one.load(layer_of(mine), NAMES)
        parts.append(one(tokens["x"], tokens["ids"], tokens["weights"], place))
    want = whole(tokens["x"], tokens["ids"], tokens["weights"]).double()
    assert parts[0].any() and parts[1].any()
    assert (parts[0].double() + parts[1].double() - want).norm() <= 2**-8 * want.norm()
