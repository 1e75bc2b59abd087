"""Continuous batching of transformers on dsv4's flash-attn calls: the tokens of the model's own eager attention."""

import functools
from collections import Counter

import in_fp64
import pytest
import tiny_dense
import torch
from batches import PROMPTS, alone, generated

from dsv4.integrations import flash_attn, transformers_serving


@pytest.fixture
def served(monkeypatch):
    """Counts dsv4's calls behind the registered name."""
    counts: Counter = Counter()
    varlen = flash_attn.flash_attn_varlen_func

    @functools.wraps(varlen)  # transformers looks at the signature
    def counted(*arguments, s_aux=None, window_size=(-1, -1), **options):
        counts["varlen"] += 1
        counts["sink"] += s_aux is not None
        counts["window"] += window_size[0] >= 0
        return varlen(*arguments, s_aux=s_aux, window_size=window_size, **options)

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", counted)
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.setattr(utils, "_loaded_implementation", None)  # functions are kept from call to call there
    transformers_serving.register()
    yield counts
    utils._loaded_implementation = None


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.compile), "gpt_oss"])
def test_requests_of_any_length_give_the_tokens_of_eager(kind, served):
    model = tiny_dense.build(kind)
    wanted = alone(model)
    model.set_attn_implementation("dsv4_flash")
    assert generated(model) == wanted
    assert served["varlen"] > 0
    if kind == "gpt_oss":
        assert served["sink"] == served["varlen"] and 0 < served["window"] < served["varlen"]


def test_without_continuous_batching_the_name_works_too(served):
    model = tiny_dense.build("llama")
    ids = torch.tensor([PROMPTS[1]])
    allowed = in_fp64.allowed(model, ids)
    with torch.no_grad():
        wanted = model(ids).logits
        model.set_attn_implementation("dsv4_flash")
        assert float((model(ids).logits - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("name", ["dsv4", "org/flash", "paged|flash"])
def test_names_that_continuous_batching_would_not_take_are_refused(name):
    with pytest.raises(ValueError, match="name: got"):
        transformers_serving.register(name)


def test_other_implementations_are_found_as_before(served):
    from transformers.modeling_flash_attention_utils import _lazy_imports

    with pytest.raises(Exception, match="no_such_flash|kernel|flash"):
        _lazy_imports("no_such_flash")
