"""Launches of prepared calls, in softsm: Triton's own launch where somebody watches, else what it ends in."""

import torch
from agreement import assert_agrees
from triton import knobs

import dsv4
import softsm
from dsv4 import reference


def call():
    """Two launches: split, then merged. Of the kernel that test_calls.py and test_v4.py compile."""
    rows, numbers = torch.randn(40, 512).half(), torch.randint(-1, 40, (1, 20), dtype=torch.int32)
    problem = dict(q=torch.randn(1, 4, 512).half(), window=rows, window_indices=numbers, compressed=rows,
                   compressed_indices=numbers, sink=torch.randn(4), softmax_scale=-0.1)  # fmt: skip
    got = dsv4.v4_attention(**problem, return_lse=True, deterministic=True, backend="softsm")
    assert_agrees(got, reference.v4_attention, **problem)


def test_hooks_of_triton_see_every_launch_of_a_call_that_was_prepared_without_them(monkeypatch):
    seen = []

    def hook(when):
        return lambda launch: seen.append((when, launch.get()["name"]))

    with softsm.use("sm_90a"):
        call()
        with monkeypatch.context() as patched:
            patched.setattr(knobs.runtime, "launch_enter_hook", hook("enter"))
            patched.setattr(knobs.runtime, "launch_exit_hook", hook("exit"))
            call()
        call()
    names = [name for when, name in seen if when == "enter"]
    assert len(names) == 2 and "combine" in names[1]
    assert seen == [(when, name) for name in names for when in ("enter", "exit")]
