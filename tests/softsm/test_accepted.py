"""What is not meant, in the place of each argument of the public functions: a ValueError that names the argument, what
it got and what is accepted, before anything runs."""

import numpy as np
import pytest
import torch

import softsm
from softsm import accepted

STORE = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry store(.param .u64 to, .param .f32 value, .param .u32 number)
{
  .reg .b32 %r<3>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [to]; ld.param.f32 %r1, [value]; ld.param.u32 %r2, [number];
  st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+4], %r2; ret;
}"""
META, SPARSE, NAN = torch.zeros(4, device="meta"), torch.eye(4).to_sparse(), float("nan")


def launch(**changes):
    words = np.zeros(2, np.uint32)
    softsm.load(STORE).launch(**dict(grid=1, block=32, args=[words, 1.5, 7]) | changes)
    return words


def entered(context):
    def call(*args, **options):
        with context(*args, **options):
            pass

    return call


def expected(**options):
    with softsm.checking():
        softsm.expect_mma(**dict(name="S", a=np.zeros((2, 2))) | options)


CALLS = {
    "use": (entered(softsm.use), dict(
        arch=(None, 90, "sm_80", ["sm_90a"]), sms=(0, True, "4", 4.0, 1 << 70), cuda_shim=("no", 1),
        ranks=(0, 9, "2", 2.0, None)),
        {"arch": "sm_90a"}),
    "checking": (entered(softsm.checking), dict(
        order=("lates", None), seed=(-1, "a", 1.5), races=("no", None), strict=(2,), tap=("x",)), {}),
    "timing": (entered(softsm.timing), dict(
        gpu=("a100", 3), clock=(-1, 0, "x", NAN, float("inf")), samples=(0, "a", 4), values=(1,)), {}),
    "ranks": (softsm.ranks, dict(count=(0, 9, "2", 2.0, None), program=(None, 3, "x")), {"count": 2, "program": int}),
    "multicast": (softsm.multicast, dict(
        members=(None, 3, [], "ab", torch.zeros(2, 8), np.zeros((2, 8)), [META] * 2, [SPARSE] * 2, ["a", "b"])), {}),
    "expect_mma": (expected, dict(
        a=("abc", [1, 2], object(), np.zeros((2, 2), complex), META, SPARSE), column=("q", -5, 512), name=(3,)), {}),
    "launch": (launch, dict(
        grid=(-1, 1 << 40, (1, 1 << 17, 1), "a", (1, 1, 1, 1), None, 1.5, (1.5,), []),
        block=(0, 2048, None, "32", (1, 1, 128), (-1, -32, 1)),
        cluster=(0, 32, "2", (4, 4, 2)), shared=(-1, "a", 1.5, None), args=(None, 3, {"to": 1}), memory=(3,),
        order=("x",), sms=(0, "a", -1, 1.5, 1 << 40), seed=("x", -1), budget=(0, "x"),
        patience=(-1, "x"), processes=(-1, "x")), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_wrong_in_turn(name):
    function, wrong, right = CALLS[name]
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{argument}(\[0\])?: got .*accepted") as error:
                function(**right | {argument: value})
            assert len(str(error.value)) < 250


def test_what_cannot_be_an_argument_of_a_kernel():
    """A tensor without memory would be a pointer to nothing."""
    for value in (None, "a", 1j, object(), [1, 2], META, SPARSE, np.array([None])):
        with pytest.raises(ValueError, match="^args: parameter to: got .*accepted: arrays, CPU tensors, numbers"):
            launch(args=[value, 1.5, 7])


def test_numbers_follow_the_type_of_the_parameter():
    words = np.zeros(2, np.uint32)
    launch(args=[words, 2, -1])
    assert words.view(np.float32)[0] == 2 and words[1] == 2**32 - 1
    launch(args=[words, 1e40, np.uint32(5)])
    assert words.view(np.float32)[0] == np.inf and words[1] == 5
    for number in (1.5, 1 << 32, -(1 << 31) - 1):
        with pytest.raises(ValueError, match="^args: parameter number: got .*accepted: ints"):
            launch(args=[words, 1.5, number])


def test_sizes_of_numpy_are_ints():
    launch(grid=np.int64(1), block=(np.int32(32),), sms=np.int64(2))
    with softsm.use("sm_90a", sms=np.int64(4)):
        pass


def test_an_unknown_option_of_a_launch():
    with pytest.raises(TypeError, match="^launch: got speed=; accepted: grid, .*order"):
        launch(speed=2)


def test_a_number_in_the_environment(monkeypatch):
    monkeypatch.setenv("SOFTSM_BUDGET", "many")
    with pytest.raises(ValueError, match="^SOFTSM_BUDGET: got 'many'; accepted: a number"):
        accepted.number_in("SOFTSM_BUDGET", 5)
    monkeypatch.setenv("SOFTSM_BUDGET", "")
    assert accepted.number_in("SOFTSM_BUDGET", 5) == 5
