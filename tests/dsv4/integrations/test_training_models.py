"""The models of tutorials/train.py train with dsv4's attention as with their own: steps of SGD on a CPU, in fp32.

The bound on a loss comes from rounding itself: eager attention in fp32 is compared with eager in fp64, step by step,
and ours may be off from eager by three times the largest of those differences.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4")
pytest.importorskip("transformers.models.gemma4")

from in_fp64 import StayDouble  # noqa: E402

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tutorial():
    """Not before a test needs it: the models of transformers take seconds to import."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "tutorials" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_double(losses, model, ids, rate, steps):
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    with StayDouble():
        return losses(exact, "eager", ids, rate, steps)


@pytest.mark.parametrize(
    "name, steps",
    [
        pytest.param("DeepSeek-V4", 6, marks=pytest.mark.compile),
        *(pytest.param(x, 20, marks=pytest.mark.slow) for x in ("DeepSeek-V4", "head dim 512")),
    ],
)
def test_losses_are_those_of_eager_attention(tutorial, name, steps):
    """SWA, CSA and HCA layers have gradients of window and compressed rows, and of the sinks. Head dims are 64 and
    512."""

    def losses(*given):
        return torch.tensor(tutorial.train(*given), dtype=torch.float64)

    assert list(tutorial.MODELS) == ["DeepSeek-V4", "head dim 512"]
    tutorial.v4.register()
    tutorial.dense.register()
    ours_name, build, shape, rate = tutorial.MODELS[name]
    model = build()
    ids = tutorial.line(model, shape)
    eager, ours = (losses(model, kind, ids, rate, steps) for kind in ("eager", ours_name))
    exact = in_double(losses, model, ids, rate, steps)
    assert eager[-1] < eager[0] - 0.1, "the model learns nothing here"
    allowed = 3 * max(float((eager - exact).abs().max()), 2.0**-22 * float(eager.max()))
    assert float((ours - eager).abs().max()) <= allowed, (ours - eager, allowed)


@pytest.mark.slow
def test_the_tutorial_prints_them(tutorial, capsys):
    tutorial.main(2)
    said = capsys.readouterr().out
    assert "DeepSeek-V4" in said and "head dim 512" in said and "eager" in said
