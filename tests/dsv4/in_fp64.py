"""What a model of transformers gives in fp64, and from it how far another way through it may be off."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StayDouble(TorchDispatchMode):
    """Models ask for fp32 in places: what is fp64 stays fp64, and positions become fp64 (transformers 5.17 multiplies
    matrices of the two)."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default and args[0].dtype in (torch.float64, torch.int64):
            if kwargs.get("dtype") == torch.float32:
                kwargs = kwargs | dict(dtype=torch.float64)
        return function(*args, **kwargs)


def allowed(model, ids, **options) -> float:
    """How far logits of another attention may be from those of eager attention in fp32: ours may be off by twice what
    eager is, so the two differ by three times that at most."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(ids, use_cache=False, **options).logits
    want = logits(model, ids, **options)
    error = (eager - want).abs().max().item()
    assert error < 1e-4 * want.std(), "a choice of experts or of rows is not certain in fp32"
    return 3 * error


@torch.no_grad()
def logits(model, ids, **options):
    """The result of the model's own eager attention, in fp64."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the grouped product has no fp64
    with StayDouble():
        got = exact(ids, use_cache=False, **options).logits
    assert got.dtype == torch.float64
    return got
