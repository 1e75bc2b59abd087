"""The cases with which rules of the timing model were developed. None of them is ever used to fit a parameter."""

from __future__ import annotations

from softsm_time import foreign
from softsm_time.case import Case
from softsm_time.library import backward, compress, fmha, index, v4, v4_backward
from softsm_time.usual import attention, matmul, rowwise, tma_matmul

PREFILL = [
    fmha(b, h, h, t, t, d, causal)
    for d in (64, 128, 256, 512)
    for b, h, t, causal in (
        (4, 16, 4096, False),
        (4, 16, 4096, True),
        (1, 16, 2048, True),
        (2, 8, 8192, False),
        (16, 16, 512, False),
    )
]
DECODE = [
    *(fmha(b, 64, 1, 1, s, 512, same=True) for b, s in ((128, 4096), (1, 65536), (32, 8192), (8, 16384), (1, 8192))),
    *(fmha(b, 64, 8, 1, s, 128) for b, s in ((64, 8192), (16, 4096), (1, 32768))),
    fmha(32, 32, 8, 1, 8192, 64),
    fmha(32, 16, 8, 1, 4096, 256),
]
V4 = [
    v4(4096, 64, 512, 0, False, 8192), v4(4096, 128, 1024, 0, False, 8192), v4(1024, 64, 128, 512, False),
    v4(128, 64, 128, 512, False), v4(1, 64, 128, 512, False), v4(1, 64, 128, 512, True), v4(32, 64, 128, 512, True),
    v4(128, 64, 128, 512, True), v4(128, 128, 128, 1024, True), v4(4096, 64, 128, 512, True),
]  # fmt: skip
INDEX = [index(1, 1, 16384), index(32, 1, 16384), index(128, 1, 16384), index(32, 4, 16384), index(1, 1024, 16384)]
COMPRESS = [
    compress("csa", 4096),
    compress("csa", 512),
    compress("keys", 4096),
    compress("hca", 4096),
    compress("hca", 1024),
]
MATMUL = [
    matmul(4096, 4096, 4096, *c) for c in ((128, 128, 64, 3, 4), (128, 256, 64, 3, 8), (64, 64, 32, 4, 4),
                                           (128, 64, 64, 4, 4), (128, 128, 32, 4, 8), (64, 256, 64, 3, 4))
] + [
    matmul(8192, 8192, 2048, 128, 256, 64, 3, 8), matmul(512, 512, 4096, 64, 64, 64, 4, 4),
    matmul(2048, 2048, 2048, 128, 128, 64, 3, 4), matmul(2048, 2048, 2048, 128, 128, 64, 3, 8),
    matmul(2048, 2048, 2048, 64, 128, 64, 4, 4),
    tma_matmul(4096, 4096, 4096, 128, 128, 64, 3, 4), tma_matmul(4096, 4096, 4096, 128, 256, 64, 3, 8),
    tma_matmul(2048, 2048, 2048, 128, 128, 64, 4, 8),
]  # fmt: skip
ATTENTION = [attention(64, 4096, 128, *c) for c in ((128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3))] + [
    attention(64, 4096, 64, 128, 64, 4, 3),
    attention(64, 4096, 64, 128, 128, 8, 2),
    attention(16, 2048, 64, 128, 64, 4, 3),
    attention(64, 4096, 128, 128, 64, 8, 3, True),
    attention(64, 4096, 128, 64, 64, 4, 3, True),
]
ROWS = [
    rowwise("add", 8192, 8192, 4), rowwise("add", 1024, 1024, 4), rowwise("softmax", 8192, 4096, 8),
    rowwise("softmax", 8192, 4096, 4), rowwise("softmax", 8192, 4096, 16), rowwise("layer_norm", 8192, 8192, 8),
    rowwise("layer_norm", 8192, 8192, 4), rowwise("layer_norm", 512, 4096, 4), rowwise("rms_norm", 16384, 4096, 8),
    rowwise("rms_norm", 16384, 4096, 4), rowwise("swiglu", 8192, 8192, 8), rowwise("swiglu", 8192, 8192, 16),
]  # fmt: skip
CASES: list[Case] = [*PREFILL, *DECODE, *V4, *INDEX, *COMPRESS, *MATMUL, *ATTENTION, *ROWS, *foreign.cases()]
# One case or more for every sm_100a kernel of the library, then some that were published for a B200.
BLACKWELL = [
    *(fmha(4, 16, 16, 8192, 8192, d, causal) for d in (64, 128) for causal in (False, True)),
    *(fmha(4, 16, 16, 4096, 4096, d) for d in (64, 128, 256, 512)), fmha(4, 16, 16, 4096, 4096, 128, True),
    fmha(128, 64, 1, 1, 4096, 512, same=True), fmha(64, 64, 8, 1, 8192, 128),
    v4(4096, 64, 512, 0, False, 8192), v4(4096, 128, 1024, 0, False, 8192), v4(4096, 64, 128, 512, True),
    v4(4096, 128, 128, 1024, True), v4(128, 64, 128, 512, True), v4(256, 128, 2048, 0, True),
    index(128, 1, 16384), index(1, 1024, 16384), compress("csa", 4096), compress("keys", 4096), compress("hca", 4096),
    *(backward(4, 16, 8192, 128, causal) for causal in (False, True)), backward(4, 16, 8192, 64),
    backward(1, 16, 2048, 512), v4_backward(4096, 64, 512, 8192),
    *foreign.cases(blackwell=True),
]  # fmt: skip
