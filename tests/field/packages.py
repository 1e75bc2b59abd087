"""Triton kernels of Python packages: results and gradients compared with PyTorch in fp64 or the package's reference.

softsm check tests/field/packages.py -- liger_rms_norm liger_rope
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
import triton


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").requires_grad_()


def agree(found, right, inputs, bound: float = 1e-5) -> None:
    """Assert that outputs and gradients agree, relative to the largest value. right: a function of fp64 inputs."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected = right(*wide)
    gradient = torch.randn_like(expected)
    learn = [x for x in inputs if x.requires_grad]
    slopes = torch.autograd.grad(found, learn, gradient.to(found.dtype))
    wanted = torch.autograd.grad(expected, [x for x in wide if x.requires_grad], gradient)
    for a, b in zip((found, *slopes), (expected, *wanted), strict=True):
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error <= bound, f"error {error:.2g}"


def near(found: torch.Tensor, right: torch.Tensor, bound: float) -> None:
    error = (found.double() - right.double()).abs().max() / right.double().abs().max()
    assert error <= bound, f"error {error:.2g}"


# -- liger-kernel ------------------------------------------------------------------------------------------------------


def liger_rms_norm() -> None:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, w = draw(9, 300), draw(300)
    found = LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    agree(found, lambda x, w: F.rms_norm(x, (300,), w, 1e-6), (x, w))


def liger_layer_norm() -> None:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    x, w, b = draw(9, 300), draw(300), draw(300)
    agree(LigerLayerNormFunction.apply(x, w, b, 1e-6), lambda x, w, b: F.layer_norm(x, (300,), w, b, 1e-6), (x, w, b))


def liger_swiglu() -> None:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    a, b = draw(9, 300), draw(9, 300)
    agree(LigerSiLUMulFunction.apply(a, b), lambda a, b: F.silu(a) * b, (a, b))


def liger_softmax() -> None:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    x = draw(9, 300)
    agree(LigerSoftmaxFunction.apply(x), lambda x: x.softmax(-1), (x,))


def liger_cross_entropy() -> None:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    x, target = draw(17, 500), torch.randint(0, 500, (17,), device="cuda")
    twin = x.detach().clone().requires_grad_()  # its gradient overwrites what it was given
    loss = LigerCrossEntropyFunction.apply(twin * 1, target, None, -100)[0]
    right = F.cross_entropy(x.double(), target)
    near(loss.detach()[None], right.detach()[None], 1e-5)
    near(torch.autograd.grad(loss, twin)[0], torch.autograd.grad(right, x)[0], 1e-5)


def liger_rope() -> None:
    from liger_kernel.ops.rope import LigerRopeFunction

    q, k = draw(2, 4, 9, 64), draw(2, 2, 9, 64)
    angle = torch.rand(1, 9, 32, device="cuda").repeat(1, 1, 2)
    turned = LigerRopeFunction.apply(q * 1, k * 1, angle.cos(), angle.sin())

    def right(x):
        half = torch.cat((-x[..., 32:], x[..., :32]), -1)
        return x * angle.cos().double() + half * angle.sin().double()

    agree(turned[0], right, (q,))
    near(turned[1], right(k.detach().double()), 1e-5)


# -- unsloth -----------------------------------------------------------------------------------------------------------


def unsloth(name: str):
    """A file of its kernels, without the package, which patches other packages when it is imported."""
    for package in ("unsloth", "unsloth.kernels"):
        folder = next(Path(x, *package.split(".")) for x in sys.path if Path(x, "unsloth").is_dir())
        module = types.ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules.setdefault(package, module)
    utilities = types.ModuleType("unsloth.kernels.utils")
    utilities.calculate_settings = lambda n: (block := 1 << (n - 1).bit_length(), max(4, min(16, block // 512)))
    utilities.torch_gpu_device = torch.cuda.device
    sys.modules.setdefault("unsloth.kernels.utils", utilities)
    return importlib.import_module(f"unsloth.kernels.{name}")


def unsloth_swiglu() -> None:
    kernels = unsloth("swiglu")
    e, g = draw(2, 5, 300).detach(), draw(2, 5, 300).detach()
    near(kernels.swiglu_fg_kernel(e, g), F.silu(e.double()) * g, 1e-5)


# -- flash-linear-attention --------------------------------------------------------------------------------------------


def first_configuration() -> None:
    """It tunes every kernel by measuring; here the first configuration that it would try runs."""
    tune = triton.autotune
    triton.autotune = lambda configs, *rest, **options: tune(configs[:1], *rest, **options)


def halves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]


def fla_retention() -> None:
    from fla.ops.retention import chunk_retention
    from fla.ops.retention.naive import naive_retention

    q, k, v = halves(*[(1, 100, 2, 64)] * 3)
    right = naive_retention(*(x.double().transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    near(chunk_retention(q, k, v)[0], right, 1 / 64)


def fla_gla() -> None:
    from fla.ops.gla import chunk_gla
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v, g = halves(*[(1, 100, 2, 64)] * 4)
    g = F.logsigmoid(g)
    near(chunk_gla(q, k, v, g)[0], naive_recurrent_gla(*(x.double() for x in (q, k, v, g)))[0], 1 / 64)


def fla_gated_delta_rule() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v = halves(*[(1, 100, 2, 64)] * 3)
    k = F.normalize(k.float(), dim=-1).bfloat16()
    g, beta = F.logsigmoid(torch.randn(1, 100, 2, device="cuda")), torch.rand(1, 100, 2, device="cuda").bfloat16()
    right = naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0]
    near(chunk_gated_delta_rule(q, k, v, g, beta)[0], right, 1 / 32)


# -- attention-gym -----------------------------------------------------------------------------------------------------


def gym_gather_attention() -> None:
    """DeepSeek-V4's attention: a window and listed rows, with a sink."""
    from attn_gym.sparse import gather_attn

    q, local, pool = halves((1, 4, 70, 128), (1, 1, 70, 128), (1, 1, 40, 128))
    rows = torch.stack([torch.randperm(40)[:16] for _ in range(70)])[None].int()
    rows[:, ::3, 10:] = -1
    sink = torch.randn(4)
    found = gather_attn(q, local, pool, rows, sink, sliding_window_size=32)
    wide = (x.double() for x in (q, local, pool))
    near(found, gather_attn(*wide, rows, sink.double(), sliding_window_size=32, impl="reference"), 1 / 64)


def gym_gated_delta_rule() -> None:
    from attn_gym.linear import recurrent_gdn

    q, k, v = halves(*[(1, 40, 2, 64)] * 3)
    k = F.normalize(k.float(), dim=-1).bfloat16()
    gate, beta = F.logsigmoid(torch.randn(1, 40, 2, device="cuda")), torch.rand(1, 40, 2, device="cuda")
    found = recurrent_gdn(q, k, v, gate, beta, autotune=False)[0]
    near(found, recurrent_gdn(*(x.double() for x in (q, k, v, gate, beta)), impl="reference")[0], 1 / 64)


if __name__ == "__main__":
    torch.manual_seed(0)
    first_configuration()
    for name in sys.argv[1:]:
        globals()[name]()
