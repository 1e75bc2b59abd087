"""Corrected copies of published sources that clang does not accept unchanged.

The files stay untouched. Where one of these is included, clang gets a corrected copy in its place (-ivfsoverlay).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

# end of a path: [(what stands there, what is meant)]
CORRECTIONS: dict[str, list[tuple[str, str]]] = {
    # CUTLASS 4.x: a comma is missing between two operands of asm; nvcc does not look at this text.
    "cute/arch/copy_sm100.hpp": [(r'"r"\(dst_addr\)\s+"l"\(src_addr\)', '"r"(dst_addr), "l"(src_addr)')],
    # CUTLASS 4.x makes a warning of later code an error, and does not take that back; FlashMLA's has it.
    "cute/atom/mma_traits_sm100.hpp": [(r'#pragma GCC diagnostic \w+ "-Wmissing-field-initializers"', "")],
    # CUTLASS's and FlashMLA's FMHA: `typename` is missing in front of a member of a dependent type; a function of the
    # device is called by the host.
    **{
        f"collective/sm100_fmha_{name}_warpspecialized.hpp": [
            (r"recast<decltype\(convert\)", "recast<typename decltype(convert)")
        ]
        for name in ("fwd_mainloop_tma", "mla_fwd_mainloop_tma", "gen_mainloop")
    },
    "collective/sm100_fmha_fwd_epilogue_tma_warpspecialized.hpp": [
        (r"CUTLASS_DEVICE (static constexpr\s+auto get_problem_shape_O)", r"CUTLASS_HOST_DEVICE \1")
    ],
    # FlashMLA's dense decode: the same.
    "sm90/decode/dense/splitkv_mla.cuh": [(r"make_tensor<T::InputT>", "make_tensor<typename T::InputT>")],
    # DeepGEMM: `template` is missing in front of a member of a dependent type.
    "deep_gemm/epilogue/sm100_store_cd.cuh": [
        (r"epilogue_type_t::apply_index_n<", "epilogue_type_t::template apply_index_n<")
    ],
    "deep_gemm/epilogue/sm100_store_cd_swap_ab.cuh": [
        (r"epilogue_type_t::apply_index_n<", "epilogue_type_t::template apply_index_n<")
    ],
    # clang's own header: without `volatile` these are gone where nobody uses what was there before.
    "include/__clang_cuda_intrinsics.h": [
        (r'__asm__\((\s*"atom\.)', r"__asm__ volatile(\1"),
        (r'("f"\(__val\.[yw]\))\s*:?\s*\);', r'\1 : "memory");'),
    ],
    # TileLang: `template` is missing, too.
    "tl_templates/cuda/copy_sm100.h": [(r"target_call_cls::copy<", "target_call_cls::template copy<")],
    # ThunderKittens: special registers in asm with operands are written with %%; nvcc also accepts %. A template that
    # nothing uses names an operand that is not there. `typename`, and commas between operands of asm, are missing.
    "include/common/util.cuh": [(r"(?<!%)%(n?cluster)", r"%%\1")],
    "ops/thread/util/sync.cuh": [(r"(?<!%)%clock64", "%%clock64")],
    "ops/thread/util/tma.cuh": [(r"(?<!%)%clock64", "%%clock64")],
    **{
        f"{name}_gemm.cu": [
            (r"(allocate<|sizeof\()(G|globals)::", r"\1typename \2::"),
            (r'(\+ (?:scale_)?offset\))(\s+"[hr]"\()', r"\1,\2"),
        ]
        for name in ("/bf16_b200", "/fp8_b200", "/mxfp8_b200", "/nvfp4_b200")
    },
    "ops/thread/memory/tile/tma.cuh": [(r"\{%3, %4, %5, %6\}\], \[%2\], %8;", "{%3, %4, %5, %6}], [%2], %7;")],
}


def macros(arch: str) -> list[str]:
    """Returns macros for CUTLASS, which checks the version of nvcc, and expects neither Blackwell nor
    __grid_constant__ from clang; without the latter, tensor maps are copied to local memory."""
    number = arch.removeprefix("sm_").rstrip("af")
    nvcc = ["-D__CUDACC_VER_MAJOR__=12", "-D__CUDACC_VER_MINOR__=9", "-D__CUDACC_VER_BUILD__=0"]
    nvcc += ["-DCUTLASS_GRID_CONSTANT_SUPPORTED"]
    if number == "90":
        return nvcc
    on = [f"-DCUTLASS_ARCH_MMA_SM{number}_SUPPORTED=1"]
    for name in (f"SM{number}_ENABLED", f"SM{number}A_ENABLED"):
        on += ["-Xarch_device", f"-DCUTLASS_ARCH_MMA_{name}=1"]
    return [*nvcc, *on]


def rules(files: Iterable[Path]) -> dict[Path, list[tuple[str, str]]]:
    """Returns the files that need corrections, each with its corrections."""
    names = {end.rpartition("/")[2] for end in CORRECTIONS}
    found = {}
    for file in (x for x in files if x.name in names):  # one of thousands: resolving a path takes time
        path = file.resolve().as_posix()
        known = next((rules for end, rules in CORRECTIONS.items() if path.endswith(end)), None)
        if known is not None:
            found[file] = known
    return found


def corrected(files: Iterable[Path], folder: Path) -> list[str]:
    """Writes corrected copies of files that need it to the folder; returns flags that let clang read them."""
    roots: list[dict[str, str]] = []
    for file, known in rules(files).items():
        text = new = file.read_text()
        for wrong, right in known:
            new = re.sub(wrong, right, new)
        if new != text:
            copy = folder / f"{len(roots)}-{file.name}"
            copy.write_text(new)
            roots.append({"type": "file", "name": str(file.resolve()), "external-contents": str(copy)})
    if not roots:
        return []
    overlay = folder / "overlay.yaml"
    overlay.write_text(json.dumps({"version": 0, "use-external-names": False, "roots": roots}))
    return ["-ivfsoverlay", str(overlay)]
