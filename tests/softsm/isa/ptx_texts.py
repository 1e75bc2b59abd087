"""PTX texts for the tensor-core tests: copy inputs to shared memory or registers, one instruction, results out.

Everything here assembles for sm_90a with .version 8.0 unless said otherwise, so that the same texts run on a GPU.
"""

import re

import numpy as np
from silicon import RECORD, run_ptx

# The lowest .version that knows an instruction, where it is not 8.0.
NEWER = [
    ("8.7", r"mma\.sync\S+k16\S+\.e\dm\d|mma\.sync\S+\.f16\.e\dm\d"),
    ("8.4", r"mma\.sync\S+\.e\dm\d|wgmma\S+\.(s8\.u8|u8\.s8)"),
    ("8.2", r"mma_async\.sp"),
]


def check(name, ptx, inputs, outputs, want, *, block=32, bound=None):
    """Run on every engine there is and compare: bit for bit, or within `bound` (an absolute error per element)."""
    for engine, results in run_ptx(ptx, inputs, outputs, block=block).items():
        for got, expected in zip(results, want):
            got = got.view(expected.dtype).reshape(expected.shape)
            if engine == "device":
                RECORD.results += got.size
            if bound is None:
                wrong = got != expected
                detail = ""
            else:
                deviation = np.abs(got.astype(np.float64) - expected) / bound
                worst = float(deviation.max())
                wrong = ~(deviation <= 1)
                detail = f", worst {worst:.3g} of the bound"
                if engine == "device":
                    RECORD.worst[name] = max(worst, RECORD.worst.get(name, 0.0))
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                if engine == "device":
                    example = {"at": at, "device": str(got[at]), "expected": str(expected[at])}
                    RECORD.disagreements.append(
                        {"instruction": name, "differ": int(wrong.sum()), "examples": [example]}
                    )
                raise AssertionError(
                    f"{engine}: {name}: element {at} is {got[at]}, expected {expected[at]} "
                    f"({int(wrong.sum())} of {wrong.size} differ{detail})"
                )


def text(body, params, *, registers=64, wide=24, halves=4, shared=0, target="sm_90a", version=None, doubles=0):
    """An entry `k`; pointers are loaded into %rd1, %rd2, ... in order; %r0 = tid, %r1 = address of `buf`."""
    if version is None:
        version = next((v for v, pattern in NEWER if re.search(pattern, body)), "8.0")
    loads = "\n".join(f"ld.param.u64 %rd{i}, [{p}];" for i, p in enumerate(params, 1))
    declared = ", ".join(f".param .u64 {p}" for p in params)
    buffer = f".shared .align 1024 .b8 buf[{shared}];" if shared else ""
    address = "mov.u32 %r1, buf;" if shared else ""
    return f""".version {version}
.target {target}
.address_size 64
.visible .entry k({declared})
{{
.reg .b32 %r<{registers}>; .reg .b64 %rd<{wide}>; .reg .b16 %rs<{halves}>; .reg .pred %p<8>;
.reg .f64 %fd<{doubles + 1}>;
{buffer}
{loads}
mov.u32 %r0, %tid.x;
{address}
{body}
ret;
}}
"""


def fill_shared(source, size, threads, label="FILL"):
    """Copy `size` bytes (a multiple of 4) from global memory at `source` into buf; uses %r2-%r4, %rd20, %rd21."""
    return f"""mov.u32 %r2, %r0;
{label}: setp.ge.u32 %p7, %r2, {size // 4};
@%p7 bra {label}_END;
shl.b32 %r3, %r2, 2;
cvt.u64.u32 %rd20, %r3;
add.s64 %rd21, {source}, %rd20;
ld.global.u32 %r4, [%rd21];
add.u32 %r3, %r1, %r3;
st.shared.u32 [%r3], %r4;
add.u32 %r2, %r2, {threads};
bra {label};
{label}_END:
fence.proxy.async;
bar.sync 0;
"""


def dump_shared(target, size, threads, label="DUMP"):
    """The other way round."""
    return f"""bar.sync 0;
mov.u32 %r2, %r0;
{label}: setp.ge.u32 %p7, %r2, {size // 4};
@%p7 bra {label}_END;
shl.b32 %r3, %r2, 2;
cvt.u64.u32 %rd20, %r3;
add.s64 %rd21, {target}, %rd20;
add.u32 %r3, %r1, %r3;
ld.shared.u32 %r4, [%r3];
st.global.u32 [%rd21], %r4;
add.u32 %r2, %r2, {threads};
bra {label};
{label}_END:
"""


def thread_pointer(base, count, to):
    """`to` = base + tid * count * 4: each thread's own `count` words."""
    return f"mul.wide.u32 {to}, %r0, {4 * count};\nadd.s64 {to}, {base}, {to};\n"


def load_words(pointer, registers):
    return "".join(f"ld.global.u32 {r}, [{pointer}+{4 * i}];\n" for i, r in enumerate(registers))


def store_words(pointer, registers):
    return "".join(f"st.global.u32 [{pointer}+{4 * i}], {r};\n" for i, r in enumerate(registers))


def names(first, count, prefix="%r"):
    return [f"{prefix}{first + i}" for i in range(count)]


def braces(registers):
    return "{" + ", ".join(registers) + "}"
