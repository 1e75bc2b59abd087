"""The published kernels that tools/field.py runs: where they are, how they are called, and what is said of findings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = {
    "cutlass": ("https://github.com/NVIDIA/cutlass", "7107b0553"),
    "FlashMLA": ("https://github.com/deepseek-ai/FlashMLA", "9241ae3"),
    "DeepGEMM": ("https://github.com/deepseek-ai/DeepGEMM", "54e2261"),
    "ThunderKittens": ("https://github.com/HazyResearch/ThunderKittens", "0b55588d"),
    "triton": ("https://github.com/triton-lang/triton", "f4fca2c0b"),
}
PACKAGES = {
    "liger-kernel": "0.8.5",
    "unsloth": "2026.10.9",
    "tabulate": "0.10.0",
    "fla-core": "0.6.0",
    "einops": "0.8.2",
    "attn-gym": "0.0.17",
}
CUTE = ("-I{cutlass}/include", "-I{cutlass}/tools/util/include", "-I{cutlass}/examples/common", "-DNDEBUG")
EXAMPLE_77 = "-I{cutlass}/examples/77_blackwell_fmha"
MLA = ("-I{FlashMLA}/csrc", "-I{FlashMLA}/csrc/sm90", "-I{FlashMLA}/csrc/kerutils/include", *CUTE)
GEMM = ("-I{DeepGEMM}/deep_gemm/include", *CUTE)
# Its initialisers need a signed char, which a host with ARM cores does not have.
TK = ("-fsigned-char", "-I{ThunderKittens}/include", "-I{ThunderKittens}/prototype", "-DNDEBUG", "-DKITTENS_BLACKWELL")


@dataclass(frozen=True)
class Kernel:
    name: str
    project: str
    file: str  # of the project; of tests/field where it has no folder
    flags: tuple[str, ...]
    arch: str = "sm_100a"
    arguments: tuple[str, ...] = ()
    sms: int = 4
    ranks: int = 1

    def source(self, sources: Path) -> Path:
        own = "/" not in self.file
        return ROOT / "tests" / "field" / self.file if own else sources / self.project / self.file

    def flags_at(self, sources: Path) -> list[str]:
        return placed(self.flags, sources)

    def arguments_at(self, sources: Path) -> list[str]:
        return placed(self.arguments, sources)


def placed(words: tuple[str, ...], sources: Path) -> list[str]:
    """{cutlass} is the folder of the project."""
    return [re.sub(r"\{(\w+)\}", lambda m: str(sources / m[1]) if m[1] in PROJECTS else m[0], x) for x in words]


def folder_of(kernel: Kernel) -> str:
    """A name for its outputs."""
    return re.sub(r"\W+", "-", f"{kernel.project} {kernel.name} {kernel.arch}").strip("-")


def tutorial(file: str, *arguments: str, sms: int = 4) -> Kernel:
    path = f"examples/cute/tutorial/blackwell/{file}"
    return Kernel(f"CuTe tutorial {file}", "cutlass", path, CUTE, arguments=arguments, sms=sms)


def gemm(file: str, element: str, arch: str) -> Kernel:
    source = f'-DSOURCE="{{cutlass}}/examples/cute/tutorial/{file}"'
    return Kernel(
        f"CuTe tutorial {Path(file).name}", "cutlass", "cute_gemm.cu", (*CUTE, source, f"-DTYPE={element}"), arch
    )


def fmha(project: str, name: str, folder: str, *flags: str) -> Kernel:
    """FlashMLA's dense prefill is made of CUTLASS's example; it needs the CUTLASS of its submodule."""
    what = (f"-I{{{project}}}/{folder}", "-DDIM=128", "-DMASK=NoMask", *flags)
    what = ("-I{FlashMLA}/csrc/cutlass/include", *MLA, *what) if project == "FlashMLA" else (*CUTE, *what)
    return Kernel(name, project, "cutlass_fmha.cu", what, arguments=("256", "256", "2", "1"))


def prefill(name: str, source: str, call: str, heads: int, dim: int, arch: str = "sm_100a") -> Kernel:
    what = (f"-DHEADS={heads}", f"-DDIM={dim}", f"-DKERNEL={call}", f'-DSOURCE="{source}/phase1.cuh"')
    return Kernel(f"sparse prefill, {name}, head dim {dim}", "FlashMLA", "flashmla_prefill.cu", (*MLA, *what), arch)


def decode(name: str, source: str, call: str, heads: int, arch: str = "sm_100a", v32: bool = False) -> Kernel:
    what = (f"-DHEADS={heads}", f"-DKERNEL={call}", f'-DSOURCE="{source}"', *(("-DROWS_656",) if v32 else ()))
    rows = "FP8 rows of V3.2" if v32 else "FP8 rows"
    return Kernel(f"sparse decode, {rows}, {name}", "FlashMLA", "flashmla_decode.cu", (*MLA, *what), arch)


def lesson(level: int, size: int) -> Kernel:
    source = f'-DSOURCE="{{ThunderKittens}}/kernels/gemm/educational_b200/level_0{level}.cu"'
    name = f"GEMM for B200, level {level}"
    return Kernel(name, "ThunderKittens", "thunderkittens.cu", (*TK, source, f"-DSIZE={size}"), sms=8)


def benchmark(name: str, folder: str, config: str, *sizes: str) -> Kernel:
    """ThunderKittens' GEMMs, with the smallest configuration of their benchmarks."""
    gemms = "{ThunderKittens}/kernels/gemm"
    what = (f"-I{gemms}", f'-DSOURCE="{gemms}/{folder}/{folder}_gemm.cu"', f"-DCONFIG={config}")
    return Kernel(f"{name} GEMM for B200", "ThunderKittens", "thunderkittens_gemm.cu", (*TK, *what), arguments=sizes)


def lecture(file: str, *calls: str, arch: str = "sm_100a") -> Kernel:
    folder, name = ("gluon/", "Gluon") if file.startswith("gluon/") else ("", "Triton")
    words = (f"{{triton}}/python/tutorials/{file}.py", *calls)
    title = f"{name} tutorial {file.removeprefix(folder)}"
    return Kernel(title, "triton", "tutorial.py", (), arch, words, sms=8)


HALF = "dtype=torch.float16"
PERSISTENT = [f"matmul_kernel_{x}" for x in ("persistent", "tma", "tma_persistent", "tma_clc", "descriptor_persistent")]
LECTURES = (
    lecture("01-vector-add", "torch.equal(add(x := normal(5000), y := normal(5000)), x + y)"),
    # ex2.approx is exact to 2 ** -22, two units, in the numerator and in the sum
    lecture("02-fused-softmax",
            "close(softmax(x := normal(37, 781, dtype=torch.float32)), torch.softmax(x.double(), 1), units=4)"),
    lecture("03-matrix-multiplication",
            f"close(matmul(a := normal(200, 96, {HALF}), b := normal(96, 160, {HALF})), a.float() @ b.float())"),
    lecture("04-low-memory-dropout",
            "torch.equal(dropout(x := normal(1000), k := (torch.rand(1000) > 0.5).int(), 0.5), x * 2 * k)",
            "((y := seeded_dropout(x := normal(1000), 0.5, 123)) == 0).logical_or(y == 2 * x).all()", "(y != 0).any()"),
    lecture("05-layer-norm", "test_layer_norm(40, 300, torch.float16)"),
    *(lecture("06-fused-attention", f'test_op(1, 2, 128, 64, True, {ws}, "bwd", "triton-fp16")', arch=arch)
      for arch, ws in (("sm_90a", False), ("sm_100a", True))),
    lecture("07-extern-functions", "asin_kernel[grid](x, output_triton, n_elements, BLOCK_SIZE=1024)",
            "close(output_triton, output_torch)"),
    lecture("08-grouped-gemm",
            f"close(group_gemm_fn([a := normal(256, 128, {HALF})] * 2, [b := normal(128, 128, {HALF})] * 2)[1], "
            "a.float() @ b.float())",
            f"close(group_gemm_tma_fn([a := normal(256, 128, {HALF})] * 2, [b := normal(128, 128, {HALF})] * 2)[1], "
            "a.float() @ b.float().T)"),
    lecture("09-persistent-matmul", f"[setattr(k, 'configs', k.configs[:1]) for k in ({', '.join(PERSISTENT)})]",
            f"close(matmul_persistent(a := normal(256, 128, {HALF}), b := normal(128, 384, {HALF})), "
            "c := a.float() @ b.float())",
            "close(matmul_tma(a, bt := b.T.contiguous(), True), c)", "close(matmul_tma_clc(a, bt, False), c)",
            "close(matmul_tma_persistent(a, bt, False), c)", "close(matmul_tma_persistent(a, bt, True), c)",
            "close(matmul_descriptor_persistent(a, bt, True), c)"),
    lecture("10-block-scaled-matmul", 'validate_block_scaled(128, 256, 512, "nvfp4")',
            'validate_block_scaled(128, 256, 512, "mixed")'),
    lecture("11-programmatic-dependent-launch", "torch.equal(add(x := normal(5000), y := normal(5000)), x + y)"),
    lecture("gluon/01-intro", "test_copy_scalar()", "test_memcpy(64, 500)"),
    lecture("gluon/02-layouts", "test_memcpy_1d(128, 1000, 4)", "test_memcpy_2d(128, 256, 100, 300, True, 4)",
            "test_memcpy_2d_inout(60, 80, True, False)"),
    lecture("gluon/03-async-copy", "test_memcpy_1d_cpasync(1000, 256)",
            "test_elementwise_add_cpasync(100, 200, 32, 32)", "test_elementwise_add_pipelined(100, 200, 32, 64, 3)"),
    lecture("gluon/04-tma", "test_tma_message_passing(16)", "test_memcpy_1d_tma(64, 500)",
            "test_elementwise_add_pipelined(100, 200, 32, 64, 3)"),
    lecture("gluon/05-wgmma", "test_small_mma(64, 32, 32, True, 16, 4)",
            "test_blocked_matmul(208, 416, 304, 64, 64, 64, True, 4)",
            "test_blocked_matmul_pipelined(208, 416, 304, 64, 64, 64, 4)", arch="sm_90a"),
    lecture("gluon/06-tcgen05", "test_tmem_example_kernel(128, 64, 4)", "test_small_mma(64, 128, 128, True, True, 4)",
            "test_blocked_matmul_pipelined(208, 416, 304, 64, 64, 64, 4)"),
    *(lecture("gluon/07-persistence",
              "test_persistent_matmul_pipelined(208, 416, 304, 64, 64, 64, 3, 4, schedulers[1])", arch=arch)
      for arch in ("sm_90a", "sm_100a")),
    lecture("gluon/08-warp-specialization", "test_elementwise_add_warp_specialized(100, 200, 32, 64, 2, 2, 4)",
            "test_matmul_warp_specialized(208, 416, 304, 128, 256, 64, 2, 4, 4, t7.schedulers[1])"),
    lecture("gluon/09-tma-gather-scatter", "test_async_gather(8, 16, 48, torch.bfloat16, 256, 256, None)",
            "test_async_scatter(8, 16, 48, torch.float32, 256, 256, None)",
            "close(matmul_fused_gather_scatter(x := normal(256, 256), i := torch.randperm(256).int(), "
            "w := normal(256, 192), j := torch.randperm(256).int(), 128, 64, 64), "
            "(x[i].float() @ w.float())[j.argsort()])"),
    lecture("gluon/10-tcgen05-copy", "test_tcgen05_copy_nvmma_shared(*configs[0], torch.float32, 64)",
            "test_matmul_accumulate(256, 256, 256, 128, 64, 64, 3, torch.float16)"),
    lecture("gluon/11-tcgen05-mma-scaled", 'test_simple_mma_scaled(256, 256, 256, "mxfp8", "mxfp4", 64, 128)',
            'test_mma_scaled_tcgen05_copy(256, 256, 256, "nvfp4", "nvfp4", 128, 128)',
            'test_mma_scaled_pipelined(256, 256, 640, "mxfp8", "mxfp4", mma_scaled_warp_specialized_kernel)'),
    lecture("gluon/12-cluster-launch-control", "test_op(512, 512, 192, True)"),
    lecture("gluon/13-conv-im2col", "test_tma_im2col_simple()", "test_tma_im2col_multi_batch_padded()",
            "test_conv2d_tma_im2col(1, 16, 16, 64, 64, 3, 3, 1, 1)"),
    lecture("gluon/14-multicta", "test_multicta_softmax_f32(16, 256)", "test_two_cta_tcgen05()",
            "test_tma_multicast_copy()", "test_tma_tcgen05()"),
)  # fmt: skip


def package(project: str, name: str, *functions: str, arch: str = "sm_100a") -> Kernel:
    return Kernel(name, project, "packages.py", (), arch, functions)


def tests(file: str, name: str, *calls: str, arch: str = "sm_100a") -> Kernel:
    words = (f"{{triton}}/python/triton_kernels/tests/{file}.py", *calls)
    return Kernel(f"triton_kernels, {name}", "triton", "tutorial.py", (), arch, words)


def scaled(
    name: str, rows: int, persistent: bool, mode: str, a: str, b: str, moved: bool, swizzled: str, arch: str = "sm_100a"
) -> Kernel:
    """A product of triton_kernels: `rows` x 128 x 256 in three groups. moved: rows are gathered and scattered;
    swizzled: which operands have their scales in the order of the hardware."""
    warps = 4 if arch == "sm_90a" else None
    words = (
        f"{rows}, 128, 256, 1, {moved}, {moved}, None, False, {persistent}, {warps}, 3, '{mode}', '{a}', '{b}', None"
    )
    words += (
        f", {128 if 'a' in swizzled else 16}, {'b' in swizzled}, False, {'a' in swizzled}, True, None, False, False"
    )
    return tests("test_matmul", f"product, {name}", f"_test_op({words}, False, None, False, 'cuda', None)", arch=arch)


PYTHON = (
    *LECTURES,
    tests("test_topk", "top k", 'test_topk(7, 200, 8, True, "float32")', 'test_topk(30, 32, 8, False, "bfloat16")'),
    tests("test_swiglu", "SwiGLU", 'test_op(30, 512, 10, "cuda")'),
    tests("test_compaction", "compaction", 'test_compaction(131, 128, 16, 0.6, "cuda")'),
    tests("test_reduce", "sums", "test_op(5, 37, 64, 'float16', 0, 'full', None)",
          "test_op(5, 37, 64, 'mxfloat8', 1, 'none', None)"),
    scaled("bf16, rows listed", 60, False, "ragged", "bfloat16", "bfloat16", True, ""),
    scaled("bf16, persistent", 60, True, "ragged", "bfloat16", "bfloat16", False, ""),
    scaled("bf16 with MXFP4 weights", 60, True, "ragged", "bfloat16", "mxfloat4_e2m1", False, "b"),
    scaled("MXFP8 with MXFP4 weights", 128, True, "batched", "mxfloat8_e4m3fn", "mxfloat4_e2m1", False, "ab"),
    scaled("NVFP4", 128, True, "batched", "nvfp4_e2m1", "nvfp4_e2m1", False, "ab"),
    scaled("bf16 with MXFP4 weights", 60, False, "ragged", "bfloat16", "mxfloat4_e2m1", False, "b", "sm_90a"),
    package("liger-kernel", "RMS norm, layer norm, SwiGLU, softmax, cross entropy, RoPE", "liger_rms_norm",
            "liger_layer_norm", "liger_swiglu", "liger_softmax", "liger_cross_entropy", "liger_rope"),
    package("unsloth", "SwiGLU", "unsloth_swiglu"),
    package("flash-linear-attention", "retention, in chunks", "fla_retention"),
    package("flash-linear-attention", "gated linear attention, in chunks", "fla_gla"),
    package("flash-linear-attention", "gated delta rule, in chunks", "fla_gated_delta_rule"),
    package("attention-gym", "window and listed rows (DeepSeek-V4)", "gym_gather_attention"),
    package("attention-gym", "gated delta rule, token by token", "gym_gated_delta_rule"),
)  # fmt: skip

SPARSE = "sm100/prefill/sparse"
KERNELS = (
    tutorial("01_mma_sm100.cu", "512", "512", "128"),
    tutorial("02_mma_tma_sm100.cu", "512", "1024", "128"),
    tutorial("03_mma_tma_multicast_sm100.cu", "512", "1024", "128", sms=16),
    tutorial("04_mma_tma_2sm_sm100.cu", "512", "1024", "128", sms=16),
    tutorial("05_mma_tma_epi_sm100.cu", "512", "1024", "128", sms=16),
    *(
        fmha(project, f"{name}, head dim {dims}", folder, *flags)
        for project, name, folder in (
            ("cutlass", "77_blackwell_fmha", "examples/77_blackwell_fmha"),
            ("FlashMLA", "dense prefill", "csrc/sm100/prefill/dense"),
        )
        for dims, flags in (("128", ()), ("192, of V 128", ("-DROPE=64",)))
    ),
    Kernel("77_blackwell_fmha_bwd, head dim 64", "cutlass", "cutlass_backward.cu",
           (*CUTE, EXAMPLE_77, "-DDIM=64", "-DMASK=NoMask"), arguments=("256", "256", "2", "1")),
    Kernel("77_blackwell_mla, decode", "cutlass", "cutlass_mla.cu",
           (*CUTE, EXAMPLE_77, "-DSCHEDULER=Sm100MlaPersistentTileScheduler"), arguments=("256", "1", "1")),
    Kernel("77_blackwell_fmha_gen, decode", "cutlass", "cutlass_gen.cu",
           (*CUTE, EXAMPLE_77, "-DSCHEDULER=IndividualTileScheduler"), arguments=("200", "2", "1", "4")),
    gemm("hopper/wgmma_sm90.cu", "cute::half_t", "sm_90a"),
    gemm("hopper/wgmma_tma_sm90.cu", "cute::half_t", "sm_90a"),
    gemm("sgemm_1.cu", "float", "sm_90a"),
    gemm("sgemm_2.cu", "float", "sm_90a"),
    gemm("sgemm_sm80.cu", "float", "sm_90a"),
    *(
        prefill(f"{heads} heads", f"{SPARSE}/fwd/head{heads}", f"sm100::fwd::head{heads}::run_fwd_phase1_kernel<DIM>",
                heads, dim)
        for heads in (64, 128)
        for dim in (512, 576)
    ),
    prefill("128 heads, few rows", f"{SPARSE}/fwd_for_small_topk/head128",
            "sm100::fwd_for_small_topk::head128::run_fwd_for_small_topk_phase1_kernel<SparseAttnFwdMode::Prefill,DIM>",
            128, 512),
    *(
        decode("64 heads", "sm100/decode/head64/kernel.cuh",
               f"sm100::decode::head64::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::{model}>", 64,
               v32=model == "V32")
        for model in ("MODEL1", "V32")
    ),
    *(
        prefill("64 heads, Hopper", "sm90/prefill/sparse", "sm90::fwd::run_fwd_phase1_kernel<DIM,false>", 64, dim,
                "sm_90a")
        for dim in (512, 576)
    ),
    *(
        decode(f"{heads} heads, Hopper", "sm90/decode/sparse_fp8/splitkv_mla.cuh",
               f"sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::{model},{heads}>", heads,
               "sm_90a", model == "V32")
        for model in ("MODEL1", "V32")
        for heads in (64, 128)
    ),
    Kernel("dense decode, its schedule and sum, Hopper", "FlashMLA", "flashmla_dense.cu", MLA, "sm_90a"),
    Kernel("bf16 GEMM", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DCTAS=1")),
    Kernel("bf16 GEMM, two CTAs", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DCTAS=2")),
    Kernel("FP8 GEMM", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DFP8", "-DCTAS=1")),
    Kernel("FP8 GEMM, two CTAs", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DFP8", "-DCTAS=2")),
    Kernel("FP8 x FP4 GEMM", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DFP8", "-DFP4", "-DCTAS=1")),
    Kernel("bf16 GEMM, Hopper", "DeepGEMM", "deepgemm.cu", (*GEMM, "-DHOPPER"), "sm_90a"),
    Kernel("scores of an indexer, e4m3", "DeepGEMM", "deepgemm_logits.cu", GEMM),
    Kernel("scores of an indexer, e2m1", "DeepGEMM", "deepgemm_logits.cu", (*GEMM, "-DFP4")),
    Kernel("scores of an indexer, e4m3", "DeepGEMM", "deepgemm_logits.cu", (*GEMM, "-DHOPPER"), "sm_90a"),
    *(
        Kernel(f"mega MoE in {name}, {count}", "DeepGEMM", "deepgemm_mega.cu", (*GEMM, *flags, f"-DRANKS={ranks}"),
               ranks=ranks)
        for name, flags in (("bf16", ()), ("FP8 x FP4", ("-DFP4",)))
        for ranks, count in ((1, "one rank"), (2, "two ranks"), (4, "four ranks"))
    ),
    Kernel("mega MoE in bf16, two ranks, two layers in a row", "DeepGEMM", "deepgemm_mega.cu",
           (*GEMM, "-DRANKS=2", "-DLAYERS=2"), ranks=2),
    *(lesson(level, 128) for level in (2, 3, 4)),
    *(lesson(level, 256) for level in (5, 6)),
    *(lesson(level, 512) for level in (7, 8, 9)),
    benchmark("bf16", "bf16_b200", "config<256,64,128,4,true,5,2>", "512", "128", "256"),
    benchmark("FP8", "fp8_b200", "config<256,64,256,4,true,5,2>", "512", "128", "512"),
    benchmark("MXFP8", "mxfp8_b200", "mxfp8_gemm::config<128,5,4,12,2,true>", "512", "256", "512"),
    benchmark("NVFP4", "nvfp4_b200", "nvfp4_gemm::config<128,5,4,12,2,true>", "512", "256", "512"),
    *PYTHON,
)  # fmt: skip

RELAXED = (
    "true by PTX: the only order is `barrier.cluster.arrive.relaxed`. It is deliberate there, and works on silicon"
)
ADDRESS = RELAXED + " (address of the tensor memory)"
SLOTS = (
    "true by PTX, like DeepGEMM#389: outputs of slots are written by ordinary stores and read by bulk copies behind a "
    "barrier of the grid, without `fence.proxy.async`"
)
CLEARED = (
    "real, hardly on silicon, exhibit 38 of the museum: a dispatch warp with no token to pull reads the numbers of "
    "tokens, and nothing orders that before another CTA clears them for the next call (what all CTAs wait for before "
    "that are the epilogues). A warp that is late by a whole layer polls for ever"
)
TOO_EARLY = (
    "real, [cutlass#2687](https://github.com/NVIDIA/cutlass/pull/2687) and "
    "[#3653](https://github.com/NVIDIA/cutlass/pull/3653), exhibit 36 of the museum: row maxima and sums are announced "
    "by an mbarrier without `tcgen05.wait::st` behind the store. It makes the result wrong where the store is late"
)
PEELED = (
    "real: the loads that are peeled off for the next tile have a predicate, but the last of them lacks it; behind the "
    "last tile nobody waits for these"
)
# (in the kernel's name, code of the finding, in the place of one of its parties): the judgement. "real" also excuses a
# wrong result.
JUDGED: dict[tuple[str, str, str], str] = {
    ("tutorial 01", "race", "01_mma_sm100.cu:289 against 01_mma_sm100.cu:274"): "true by PTX. The tile is written by "
    "ordinary stores and read by `tcgen05.mma`, with a barrier between them but no `fence.proxy.async`",
    (
        "tutorial 02",
        "deadlock",
        "",
    ): "real, rare on silicon. All warps wait by parity at lines 318 and 335, and nothing keeps warp 0 from ending two "
    "phases while another warp has not looked; that one waits for a phase that never comes",
    (
        "wgmma_tma_sm90.cu",
        "in-flight",
        "wgmma_tma_sm90.cu:17",
    ): "real where K has fewer tiles than the pipeline has stages, "
    "as here: the load of the last stage is issued and nobody waits for it before the CTA ends",
    (
        "wgmma_sm90.cu",
        "race",
        "wgmma_sm90.cu:270",
    ): "real by PTX. Each thread waits for its own `cp.async` alone, and no "
    "barrier or fence follows before `wgmma` reads the copies of all",
    (
        "level 6",
        "deadlock",
        "",
    ): "real, rare on silicon. Warps 1 to 3 wait for `inputs_arrived` by parity, and nothing keeps "
    "warp 0 from ending two phases while one of them has not looked",
    **{
        ("fmha_bwd", code, ""): "real, exhibit 39 of the museum, hidden while the memory stays as it is: all tensor "
        "memory is freed behind a barrier of the compute warps alone; the last product of dQ, and the warps that load "
        "it, may not be done"
        for code in ("in-flight", "tmem-unallocated")
    },
    ("77_blackwell_mla", "race", "sm100_fmha_mla_tma_warpspecialized.hpp:1702"): "real, the mistake of exhibit 30: row "
    "maxima are exchanged through one buffer, and no barrier lies between a read and the store of the next step. It "
    "makes the result wrong here; one barrier behind line 1706 fixes it",
    (
        "77_blackwell_mla",
        "barrier-groups",
        "sm100_fmha_mla_tma_warpspecialized.hpp:816",
    ): "true, harmless: all warps of "
    "the CTA arrive at a barrier of five, and nobody waits there any more (line 778 is commented out)",
    ("level 9", "in-flight", "tensor.cuh:133"): "true by PTX: warp 0 frees the tensor memory behind a barrier of the "
    "cluster, to which the other warps come by ending; an end releases nothing",
    **{
        (
            name,
            "peer-exit",
            "_gemm.cu:1",
        ): "real, hardly on silicon: the last arrivals at `schedule_finished` of CTA 0, "
        "of a loader and a scheduler that has no further tile; nothing makes CTA 0 wait for them before it ends"
        for name in ("bf16 GEMM for B200", "FP8 GEMM for B200")
    },
    **{
        (name, code, "mainloop_tma_warpspecialized.hpp"): TOO_EARLY
        for name in ("77_blackwell_fmha", "dense prefill")
        for code in ("race", "in-flight")
    },
    **{("fmha_gen", code, "gen_mainloop_warpspecialized.hpp"): TOO_EARLY for code in ("race", "in-flight")},
    (
        "fmha_gen",
        "uninitialised",
        "fmha_common.hpp:50",
    ): "true, harmless: one warp makes 32 rows of P, and the product reads 128; "
    "nobody reads the other rows of its result",
    (
        "scores of an indexer, e2m1",
        "race",
        "ld_st.cuh:148",
    ): "true by PTX, like DeepGEMM#389: all lanes of a warp store "
    "scales to shared memory and fence, and an elected one issues `tcgen05.cp`; `elect.sync` orders no memory",
    ("tutorial 06-fused", "uninitialised", "06-fused-attention.py:309"): "true by PTX, of the compiler: the last step, "
    "peeled off a loop that has no steps here, loads sums that no product wrote; what uses them is predicated off",
    ("tutorial 07-persistence", "in-flight", "07-persistence.py:6"): PEELED,
    ("tutorial 09-tma-gather", "in-flight", "09-tma-gather-scatter.py:47"): PEELED,
    (
        "tutorial 13-conv",
        "race",
        "13-conv-im2col.py",
    ): "real, exhibit 37 of the museum: the loads of the next step go into the only "
    "buffer before `wait_num_outstanding` has waited for the product that reads it",
    ("64 heads", "race", "kernel.cuh:229 against kernel.cuh:309"): "real, exhibit 30 of the museum. "
    "It makes the result wrong here; one barrier before line 309 fixes both",
    ("mega MoE", "race", "ld_st.cuh:103 against sm100_bf16_mega_moe.cuh:236"): ADDRESS,
    ("mega MoE", "race", "ld_st.cuh:103 against sm100_fp8_fp4_mega_moe.cuh:279"): ADDRESS,
    ("mega MoE", "race", "sm100_bf16_mega_moe.cuh:569 against ld_st.cuh:165"): CLEARED,
    ("mega MoE", "race", "sm100_fp8_fp4_mega_moe.cuh:630 against ld_st.cuh:165"): CLEARED,
    ("mega MoE", "race", "tma.cuh:69 against sm100_bf16_mega_moe.cuh:1079"): SLOTS,
    ("mega MoE", "race", "tma.cuh:69 against sm100_fp8_fp4_mega_moe.cuh:1231"): SLOTS,
    (
        "mega MoE",
        "race",
        "tma_copy.cuh:41 against sm100_fp8_fp4_mega_moe.cuh:",
    ): "true by PTX, like DeepGEMM#389: scales "
    "are written by ordinary stores and read by TMA behind a release and an acquire, without `fence.proxy.async`",
    ("GEMM, two CTAs", "race", "_gemm"): ADDRESS,
    ("GEMM, two CTAs", "in-flight", "_gemm"): RELAXED + " (`tcgen05.dealloc`)",
}
