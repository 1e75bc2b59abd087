"""Products on one accumulator are computed together; D is what one product after the other makes it."""

import layouts
import numpy as np
import pytest
import tensor_kernels as tk
from layouts import SW128

import softsm
from softsm.engine import mma_chains
from softsm.engine.launch import load
from softsm.isa import instruction_descriptor as idesc
from softsm.isa import product_chain, tcgen05

SIZE, B_AT, N = 32768, 16384, 32
MMA = "tcgen05.mma.cta_group::1.kind::f16"


def image(seed=0):
    """A [128, 64] and B [N, 64] in shared memory, 128-byte swizzle, K-major."""
    rng = np.random.default_rng(seed)
    data = np.zeros(SIZE, np.uint8)
    layouts.place(data, layouts.values(rng, (128, 64), "bf16"), "bf16", SW128, True, 0)
    layouts.place(data, layouts.values(rng, (N, 64), "bf16"), "bf16", SW128, True, B_AT)
    return data.view(np.uint32)


def product(step, add, *, at=0, guard=""):
    """Step `step` along k, onto D at column `at`."""
    text = f"add.s64 %rd11, %rd13, {2 * step};\nadd.s64 %rd12, %rd14, {2 * step};\nsetp.ne.u32 %p5, {int(add)}, 0;\n"
    return text + f"{guard}{MMA} [%r8+{at}], %rd11, %rd12, %r21, %p5;\n"


def kernel(products, setup=""):
    """One thread starts the products; D is read by all, when the last of them are complete."""
    descriptors = (layouts.descriptor(at, 0, 1024, SW128, True) for at in (0, B_AT))
    body = "@!%p1 bra STARTED;\nsetp.eq.u32 %p6, 0, 0;\n" + setup
    body += "".join(f"add.s64 %rd{13 + i}, %rd3, {x};\n" for i, x in enumerate(descriptors))
    body += f"mov.u32 %r21, {idesc.encode('f16', 128, N, 'bf16', 'bf16')};\n{products}{tk.COMMIT}STARTED:\n"
    for n in range(1 + products.count(tk.COMMIT)):
        body += tk.WAIT.format(n=n, parity=n)
    body += f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {tk.names(140, N)}, [%r9];\ntcgen05.wait::ld.sync.aligned;\n"
    return tk.kernel(body + tk.words_out(N, 140), size=SIZE, words=SIZE // 4, columns=128)


def launched(text, order="eager", seed=0):
    out = np.full((128, N), np.nan, np.float32)
    tk.launch(text, image(), out, order=order, seed=seed)
    return out


@pytest.fixture
def lengths(monkeypatch):
    """How many products are computed at a time."""
    seen = []
    perform = product_chain.Chain.perform

    def counted(chain):
        seen.append(len(chain.parts))
        perform(chain)

    monkeypatch.setattr(product_chain.Chain, "perform", counted)
    return seen


FOUR = product(0, False) + "".join(product(step, True) for step in (1, 2, 3))
OTHER_D = product(0, False) + product(1, True) + product(0, False, at=64) + product(2, True) + product(3, True)
FRESH = product(0, False) + product(1, True) + product(2, False) + product(3, True)
BARRIER = product(0, False) + product(1, True) + "bar.warp.sync 1;\n" + product(2, True)
GUARDED = product(0, False, guard="@%p6 ") + product(1, True, guard="@%p6 ") + product(2, True, guard="@!%p6 ")
CHANGING = product(0, False, guard="@%p6 ") + "setp.ne.u32 %p6, 0, 0;\n" + product(1, True, guard="@%p6 ")


@pytest.mark.parametrize(
    "products, want",
    [(FOUR, [4]), (OTHER_D, [2, 1, 2]), (FRESH, [2, 2]), (BARRIER, [2, 1]), (GUARDED, [2]), (CHANGING, [1])],
    ids=["four", "another D between", "begun again", "a barrier between", "guards", "a guard that changes"],
)
@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_the_sums_are_those_of_one_after_the_other(products, want, order, lengths, monkeypatch):
    together = launched(kernel(products), order)
    assert sum(lengths) == sum(want)
    if order == "eager":
        assert lengths == want
    monkeypatch.setattr(product_chain, "LONGEST", 1)
    alone = launched(kernel(products), order)
    assert np.isfinite(alone).all() and len(np.unique(alone)) > 100
    assert together.tobytes() == alone.tobytes()


def test_what_is_stored_behind_a_product_comes_too_late_for_it():
    """The store races with the product; performed at issue, the product has read before."""
    setup = "mov.u32 %r30, 0x42424242;\n"
    store = "".join(f"st.shared.u32 [%r1+{B_AT + 4 * i}], %r30;\n" for i in range(16))
    behind = launched(kernel(product(0, False) + product(1, True) + store, setup))
    assert behind.tobytes() == launched(kernel(product(0, False) + product(1, True))).tobytes()
    between = launched(kernel(product(0, False) + store + product(1, True), setup))
    assert between.tobytes() != behind.tobytes(), "the second product reads what was stored"
    before = launched(kernel(store + product(0, False) + product(1, True), setup))
    assert before.tobytes() != between.tobytes(), "the first did not"


@pytest.fixture
def in_python(monkeypatch):
    """The place of each product that Python issued."""
    seen, start = [], tcgen05.start
    monkeypatch.setattr(tcgen05, "start", lambda w, *args: seen.append(w.pc) or start(w, *args))
    return seen


def checked(k):
    out = np.full((128, N), np.nan, np.float32)
    with softsm.checking() as report:
        k.launch(1, 128, [image(), out])
    return [str(d) for d in report], out.tobytes(), report


# While the second product is in flight and others may join it, the first completes: somebody waits for it.
WAITED = product(0, False, at=64) + tk.COMMIT + product(0, False) + tk.WAIT.format(n="ED", parity=0)
WAITED += product(1, True) + product(2, True) + product(3, True, at=64)
STORE = "mov.u32 %r30, 0;\nst.shared.u32 [%r1+{}], %r30;\n"
NEVER_WRITTEN = product(0, True) + product(1, True) + product(2, True)


@pytest.mark.parametrize("products, again", [
    (FOUR, 1), (OTHER_D, 3), (FRESH, 2), (BARRIER, 1), (GUARDED, 1), (NEVER_WRITTEN, 1), (FOUR + STORE.format(32), 1),
    (product(0, False) + STORE.format(32) + product(1, True) + product(2, True), 2), (WAITED, 3),
], ids=["four", "another D between", "begun again", "a barrier between", "guards", "nothing to add to",
        "a store behind", "a store before the second", "one before them completes"])  # fmt: skip
def test_products_of_compiled_code_are_compared_like_those_of_python(products, again, in_python, monkeypatch):
    """`again`: products that Python issues when the kernel runs once more; the others join the one before them."""
    k = load(kernel(products) + "// not that of another test, which has run before\n")
    first = checked(k)
    assert len(in_python) == products.count(MMA) - products.count("@!%p6")
    in_python.clear()
    second = checked(k)
    assert len(in_python) == again
    assert second[:2] == first[:2]
    monkeypatch.setattr(mma_chains.Growing, "begin", lambda *args: None)
    assert checked(k)[:2] == first[:2]


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("launches", [1, 2])
def test_a_race_names_the_product_that_it_is_about(step, launches):
    """Four products in flight complete as one operation; which of them reads what is overwritten has to be said."""
    text = kernel(FOUR + STORE.format(32 * step))
    k = load(text)
    for _ in range(launches):  # the second one's products are issued by compiled code
        _, _, report = checked(k)
    (found,) = [d for d in report if "st.shared.u32" in d.parties[0].instruction]
    lines = [at for at, line in enumerate(text.splitlines(), 1) if MMA in line]
    assert found.code == "race" and found.parties[1].ptx_line == lines[step]
    assert "tcgen05.mma issued by warp 0" in found.parties[1].who


def test_products_of_compiled_code_that_nobody_waits_for_are_reported():
    text = kernel(FOUR).replace(tk.COMMIT, "")
    text = text.replace(tk.WAIT.format(n=0, parity=0), "")
    k = load(text)
    first, second = checked(k), checked(k)
    assert second[0] == first[0]
    flying = [d for d in second[2] if "nothing waited" in d.message]
    assert {d.parties[0].ptx_line for d in flying} == {at for at, x in enumerate(text.splitlines(), 1) if MMA in x}


def test_a_product_waits_only_where_the_next_is_certain():
    """Arithmetic may stand between; a store, a branch or a guard that changes may not."""

    def following(products):
        k = load(kernel(products))
        return [m.operands.following > 0 for m in k.macro_at.values() if m.function is tcgen05.do_mma]

    assert following(FOUR) == [True, True, True, False]
    assert following(GUARDED) == [True, False, False]
    assert following(CHANGING) == [False, False]
    assert following(BARRIER) == [True, False, False]
    assert following(product(0, False) + "st.shared.u32 [%r1], %r0;\n" + product(1, True)) == [False, False]
    assert following(product(0, False) + "@%p5 bra NEXT;\nNEXT:\n" + product(1, True)) == [False, False]
