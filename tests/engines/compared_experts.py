"""Compares the experts of an engine: what each layer loads with the checkpoint, and each call with the oracle. A
difference ends the engine. FP4_CHECKPOINT in the environment is the folder of the checkpoint."""

import itertools
import os
import sys
from pathlib import Path

import torch

TOKENS = 8  # of a call, because the oracle is slow


def prepare() -> None:
    sys.path.append(str(Path(__file__).parents[1] / "dsv4"))
    import moe_cases
    from safetensors.torch import load_file

    from dsv4 import Fp4Experts
    from dsv4.integrations import engines

    tensors = load_file(Path(os.environ["FP4_CHECKPOINT"]) / "model.safetensors")
    load, moe, layers = engines.EngineExperts.load, engines.moe, itertools.count()

    def loaded(self, layer, names):
        load(self, layer, names)
        wanted = Fp4Experts.from_checkpoint(tensors, f"layers.{next(layers)}.ffn.experts.")
        for ours, theirs in zip(self.experts.dequantize(torch.float32), wanted.dequantize(torch.float32)):
            assert torch.equal(ours, theirs)

    def compared(x, experts, ids, weights, **options):
        out = moe(x, experts, ids, weights, **options)
        some = slice(None, None, max(1, len(x) // TOKENS))
        given = dict(x=x[some], ids=ids[some], weights=weights[some])
        moe_cases.assert_right(out[some], None, experts, given, limit=options["limit"])
        return out

    engines.EngineExperts.load, engines.moe = loaded, compared
