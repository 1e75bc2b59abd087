"""A right program is right whenever its asynchronous operations complete: late, as its waits allow, or at random."""

from __future__ import annotations

import pytest
import test_attention
import test_gluon_blackwell as blackwell
import test_gluon_hopper as hopper
import test_matmul
import torch

from softsm.engine.launch import options


@pytest.fixture(params=[("latest", 0), ("random", 1), ("random", 2)], ids=lambda p: f"{p[0]}{p[1] or ''}")
def order(request):
    with options(order=request.param[0], seed=request.param[1]):
        yield


def test_wgmma(sm90, order):
    hopper.test_wgmma_from_shared_memory(sm90, torch.bfloat16, 64)
    hopper.test_wgmma_from_registers(sm90)


def test_warp_specialised_wgmma(sm90, order):
    hopper.test_warp_specialised_matmul(sm90, 3)


def test_gather_by_cp_async(sm, order):
    hopper.test_gather_by_cp_async(sm)


def test_tcgen05(sm100, order):
    blackwell.test_mma_from_shared_memory(sm100, torch.bfloat16, 128, 128, 64)
    blackwell.test_mma_with_the_left_operand_in_tensor_memory(sm100)


def test_warp_specialised_tcgen05(sm100, order):
    blackwell.test_warp_specialised_persistent_matmul(sm100, 2)


@blackwell.needs_39
def test_pair_of_ctas(sm100, order):
    blackwell.test_pair_of_ctas(sm100, 256)


def test_gather4(sm100, order):
    blackwell.test_gather4(sm100)


def test_matmul_with_device_descriptors(sm, order):
    test_matmul.test_persistent_matmul_with_device_descriptors(sm)


def test_attention_of_triton(sm, order):
    test_attention.test_fused_attention(sm, torch.float16, 64, True)
