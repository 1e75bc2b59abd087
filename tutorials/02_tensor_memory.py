"""# 2. Tensor memory: who owns which lane

Tensor memory is addressed by lane (0 to 127) and column (0 to 511, 32 bits each). A product of 128 rows puts row m of
its result into lane m and column n of it into column n, so a row of S is one lane and 128 columns of it.

Warps reach it with `tcgen05.ld` and `tcgen05.st`. Warp w of a warpgroup may touch lanes 32 w to 32 w + 31 and no
others: that is the first rule, and why softmax needs four warps. The second is the *shape* of the access, which defines
what each register of each thread holds (t: thread, r: register):

| shape   | lane                  | column                       |
|---------|-----------------------|------------------------------|
| 32x32b  | t                     | r                            |
| 16x64b  | t/4 + 8 (t%2)         | 2 r + (t/2)%2                |
| 16x128b | t/4 + 8 (r%2)         | 4 (r/2) + t%4                |
| 16x256b | t/4 + 8 ((r/2)%2)     | 8 (r/4) + 2 (t%4) + r%2      |
| 16x32bx2| t%16                  | r, or the second half of the columns for t >= 16 |

The first one suits softmax: a thread has a whole row, so its maximum and its sum need no other thread.
16x256b is the old register fragment of `mma.sync`: a thread has two columns each of two rows. Read one as if it were
the other and the row maximum is taken over the wrong elements; the numbers look almost right.

In Gluon the shape is part of the register layout. The kernel below writes a tile with one shape and reads it back
with another: tensor memory does not record how it was written. `owner` is the table as code; a check shows that every
cell of an access has exactly one owner.

Stores with the 16-lane shapes need an aligned column; 32x32b accepts any column. And an access covers columns that
must have been allocated and written: softsm fills unwritten columns with NaN and reports who read them.

Museum: exhibits 3 (alignment of 16x256b), 12 and 13 (row maximum over the wrong fragment), 24 (another warp's lanes).
"""

from ladder import TensorMemoryLayout, allocate_tensor_memory, gl, gluon, put, run, say, torch

SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "32x32b_splitn")


@gluon.jit
def there_and_back(x_ptr, y_ptr, WRITE: gl.constexpr, READ: gl.constexpr):
    """y = x [128, 64] fp32, through tensor memory."""
    t = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout([128, 64], col_stride=1))
    LW: gl.constexpr = t.get_reg_layout(instr_variant=WRITE)
    LR: gl.constexpr = t.get_reg_layout(instr_variant=READ)
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, LW))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LW))
    t.store(gl.load(x_ptr + row[:, None] * 64 + column[None, :]))
    put(y_ptr, t.load(LR))


def owner(shape: str, thread: int, register: int) -> tuple[int, int]:
    """(lane, column) of a register, by the table above; thread 0 to 31 of a warp."""
    t, r = thread, register
    return {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2),
        "16x128b": (t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4),
        "16x256b": (t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2),
    }[shape]


def check_shapes_agree() -> None:
    """Every shape reads what another one wrote."""
    x, y = torch.randn(128, 64), torch.full((128, 64), float("nan"))
    for write, read in zip(SHAPES, SHAPES[1:] + SHAPES[:1]):
        report = run(there_and_back, x, y.fill_(float("nan")), write, read)
        assert torch.equal(x, y) and not report, f"{write} then {read}: {report}"


def check_every_cell_has_one_owner() -> None:
    for shape in SHAPES[:4]:
        lanes = 32 if shape == "32x32b" else 16
        columns = {"32x32b": 8, "16x64b": 16, "16x128b": 16, "16x256b": 16}[shape]
        registers = lanes * columns // 32
        cells = {owner(shape, t, r) for t in range(32) for r in range(registers)}
        assert cells == {(lane, column) for lane in range(lanes) for column in range(columns)}, shape


def show() -> None:
    for shape in SHAPES[:4]:
        cells = ", ".join(str(owner(shape, 5, r)) for r in range(4))
        say(f"{shape:8} thread 5, registers 0 to 3 hold (lane, column) {cells}")


if __name__ == "__main__":
    from read import main

    main(__file__)
