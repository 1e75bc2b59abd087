"""Names and places of C++ programs, as reports show them."""

import pytest

from softsm.ptx import parse
from softsm.ptx.ast import SourceLoc
from softsm.ptx.cplusplus import demangled, outside, readable, spelled, variable


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("_Z4vaddPKfS0_Pfi", "vadd"),
        ("_Z6reduceILb1EEvPKfPfi", "reduce<true>"),
        ("_ZN2ns1A3runIiEEvT_", "ns::A::run<int>"),
        ("attention", "attention"),
        ("_Znothing", "_Znothing"),
        (
            "_Z1fI1AILi128ELi64EESt4pairIS0_S0_ESt6vectorIiSaIiEEEvT_T0_T1_",
            "f<A<128, 64>, std::pair<A, A>, std::vec...>",
        ),
    ],
)
def test_names(name, want):
    if not demangled("_Z1fv"):
        pytest.skip("this machine has no libstdc++.so.6")
    assert readable(name) == want


def test_names_that_the_library_does_not_take():
    assert spelled("_ZL11gemm_deviceI13SharedStorageINbroken") == "gemm_device<...>"
    assert spelled("_ZN9deep_gemm9gemm_implIXbroken") == "deep_gemm::gemm_impl<...>"
    assert spelled("_Z4vaddPKfbroken") == "vadd" and spelled("_Znothing") == "_Znothing"


def test_variables_of_functions():
    assert variable("_ZZ13matmul_kernelN7kittens2glI13__nv_bfloat16Li1EEEE14inputs_arrived") == "inputs_arrived"
    assert variable("_ZZ6kernelPfE4tile_0") == "tile" and variable("_ZZ1fvE7tile_12") == "tile_12"
    assert variable("tile") == "tile" and variable("_ZZbroken") == "_ZZbroken" and variable("_Z1fv") == "_Z1fv"


def test_places_outside_the_libraries():
    kernel = SourceLoc("/home/me/gemm.cu", 40, 1, "gemm")
    wrapper = SourceLoc("/opt/cutlass/include/cute/arch/copy_sm100.hpp", 380, 1, "copy", kernel)
    inner = SourceLoc("/usr/lib/llvm-22/lib/clang/22/include/__clang_cuda_builtin_vars.h", 66, 1, "x", wrapper)
    assert outside(inner) is kernel and outside(kernel) is kernel
    example = SourceLoc("/opt/cutlass/examples/cute/tutorial/x.cu", 9, 1, "f")
    assert outside(SourceLoc("include/cute/algorithm/copy.hpp", 59, 1, "f", example)) is example
    for header in ("device_atomic_functions.hpp", "cooperative_groups/details/helpers.h", "cuda_bf16.hpp"):
        assert outside(SourceLoc(f"/usr/local/cuda/include/{header}", 107, 1, "f", kernel)) is kernel
    own = SourceLoc("/home/me/include/device_tables.h", 1, 1, "f", kernel)
    assert outside(own) is own
    alone = SourceLoc("/opt/include/cute/x.hpp", 1, 1, "f")
    assert outside(alone) is alone


def test_clang_has_places_of_inlined_lines_in_comments():
    text = """.version 8.0\n.target sm_90a\n.address_size 64
.visible .entry k()
{
.reg .b32 %r<2>;
.loc 1 66 27  // /clang/__clang_cuda_builtin_vars.h:66:27 @[ lib.cuh:9:2 @[ kernel.cu:3:71 ] ]
mov.u32 %r1, %tid.x;
.loc 2 5 1  // kernel.cu:5:1
ret;
}
.file 1 "/clang/__clang_cuda_builtin_vars.h"
.file 2 "/home/me/kernel.cu"
"""
    first, last = parse(text).functions["k"].body
    chain = [first.loc, first.loc.caller, first.loc.caller.caller]
    assert [(at.file, at.line) for at in chain] == [
        ("/clang/__clang_cuda_builtin_vars.h", 66),
        ("lib.cuh", 9),
        ("/home/me/kernel.cu", 3),
    ]
    assert last.loc.caller is None and outside(first.loc).file == "lib.cuh"
