"""# 3. Softmax in tensor memory

S lies in tensor memory, a row per lane. With the 32x32b load every thread holds one whole row, so softmax is plain
register code: the maximum, an exponential per element, the sum. `exp(x)` is computed as `exp2(x log2(e))`, since that
is what the hardware has, and the scale includes the factor log2(e): one multiply-add and one exponential per score.
Scale the scores and scale the maximum too, once each: a maximum that is scaled twice is still a fine reference
point for one tile, which is why the mistake stays hidden until there are two tiles (chapter 6).

The result P goes back to where the tensor core can read it, as bf16. In tensor memory two bf16 share a column, so P
of 128 keys needs 64 columns, and it may overwrite S's first half *after* every score of the row has been read.
Inside a thread that order is the order of the program. Between the product that wrote S and the load that reads
it there is nothing of the kind: a commit, a wait on its barrier, and only then the load.

The kernel divides by the row sum at once; the later chapters leave that to the end, where it costs one multiplication
per element of O instead of one per score.

Museum: exhibits 11 (double scaling), 12 (one maximum for a whole fragment), 10 (reading before the product is
complete).
"""

from ladder import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    compare,
    descriptor,
    gl,
    gluon,
    mbarrier,
    normal,
    put,
    run,
    say,
    softmax,
    tcgen05_commit,
    tcgen05_mma,
    tma,
    torch,
)


@gluon.jit
def probabilities(q_desc, k_desc, p_ptr, scale, D: gl.constexpr, WAIT: gl.constexpr):
    """P [128, 128] = softmax of the rows of Q K^T, back through tensor memory as bf16."""
    q = gl.allocate_shared_memory(q_desc.dtype, [128, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, D], k_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    mbarrier.expect(landed, 2 * 128 * D * 2)
    tma.async_load(q_desc, [0, 0], landed, q)
    tma.async_load(k_desc, [0, 0], landed, k)
    mbarrier.wait(landed, 0)
    tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
    tcgen05_commit(done)
    if WAIT:
        mbarrier.wait(done, 0)

    x = s.load()  # thread t of warp w: row 32 w + t
    m = gl.max(x, 1) * scale
    p = gl.exp2(x * scale - m[:, None])
    p = p / gl.sum(p, 1)[:, None]
    cells = s.reinterpret(gl.bfloat16, [128, 256], TensorMemoryLayout([128, 128], col_stride=1)).slice(0, 128)
    cells.store(p.to(gl.bfloat16))
    put(p_ptr, cells.load())


def attempt(wait: bool = True, order: str = "latest"):
    q, k, p = normal(128, 64), normal(128, 64, seed=1), torch.full((128, 128), float("nan")).bfloat16()
    scale = 64**-0.5 * 1.4426950408889634  # 1 / sqrt(D), in base 2
    report = run(probabilities, descriptor(q, [128, 64]), descriptor(k, [128, 64]), p, scale, 64, wait, order=order)
    return p, softmax(q, k), report


def check_rows() -> None:
    p, want, report = attempt()
    compare(p, want)
    assert not report, str(report)


def check_a_load_before_the_product_is_found() -> None:
    _, _, report = attempt(wait=False, order="eager")
    assert "race" in report.codes(), str(report)


def show() -> None:
    p, want, _ = attempt()
    say(f"P: relative error {compare(p, want):.2g} (bf16 rounds to {2.0**-9:.2g}). Without the wait for the product:")
    say(str(next(iter(attempt(wait=False, order="eager")[2]))))


if __name__ == "__main__":
    from read import main

    main(__file__)
