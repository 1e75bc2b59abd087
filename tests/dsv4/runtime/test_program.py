"""What a program does besides launches: workspace, copies of tensors and of parts of them, fills."""

import pytest
import torch

from dsv4.runtime.program import Compute, Copy, Fill, Program, Slot


def run(program: Program, tensors: list) -> list:
    memory = tensors + [torch.full(x.shape, -1.0, dtype=x.dtype) for x in program.buffers]
    for step in program.steps:
        assert isinstance(step, Copy | Fill | Compute)
        step.run(memory)
    return memory


@pytest.mark.parametrize("shape, strides", [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (40, 8, 1)), ((2, 3, 4), (1, 2, 6))])
def test_a_copy_is_contiguous_whatever_the_strides(shape, strides):
    x = torch.arange(100.0).as_strided(shape, strides)
    program = Program({"x": x}, x.device)
    copied = program.copied(Slot.of(0, "x", x))
    assert copied.is_contiguous() and torch.equal(run(program, [x])[copied.index], x)


def test_a_part_of_a_tensor_is_copied_as_that_part():
    """Two dimensions as one, and a range of flat memory."""
    x = torch.arange(24.0).view(2, 3, 4)
    program = Program({"x": x}, x.device)
    slot = Slot.of(0, "x", x)
    lines = program.copied(program.flattened(slot))
    part = program.copied(slot.view((5,), (1,), 7))
    memory = run(program, [x])
    assert torch.equal(memory[lines.index], x.flatten(0, 1))
    assert torch.equal(memory[part.index], torch.arange(7.0, 12.0))


def test_dimensions_that_are_no_lines_of_one_tensor_are_copied_before_they_are_joined():
    x = torch.arange(48.0).view(2, 6, 4)[:, :3]
    program = Program({"x": x}, x.device)
    lines = program.flattened(Slot.of(0, "x", x))
    assert lines.shape == (6, 4) and torch.equal(run(program, [x])[lines.index].view(6, 4), x.flatten(0, 1))


def test_slots_answer_like_the_tensors_they_stand_for():
    x = torch.arange(48.0).view(2, 6, 4)[:, ::2]
    slot = Slot.of(0, "x", x)
    assert slot.unsqueeze(1).shape == x.unsqueeze(1).shape and slot.numel() == x.numel()
    assert slot.is_contiguous() == x.is_contiguous() and slot.stride() == x.stride()
    assert slot.data_ptr() == x.data_ptr() % 16


def test_views_of_a_slot_are_views_of_its_tensor():
    x = torch.arange(96).view(2, 6, 8).to(torch.int16)[:, 1:]
    program = Program({"x": x}, x.device)
    (slot,) = program.slots
    seen = {
        "part": (slot[1, 2:4], x[1, 2:4]),
        "heads": (slot.unflatten(2, (2, 4)).transpose(1, 2), x.unflatten(2, (2, 4)).transpose(1, 2)),
        "wide": (slot[:, 1:].bytes_as(torch.int64), x[:, 1:].view(torch.int64)),
        "flat": (slot[:1].flatten(0, 1), x[:1].flatten(0, 1)),
    }
    for name, (view, want) in seen.items():
        got = view.tensor([x])
        assert torch.equal(got, want) and got.stride() == want.stride() and got.data_ptr() == want.data_ptr(), name
        assert view.data_ptr() == want.data_ptr() % 16
    with pytest.raises(AssertionError, match="not a view"):
        slot.seen_as(torch.clone)


def test_a_function_gets_tensors_in_place_of_slots():
    x, y = torch.arange(6.0), torch.zeros(3)
    program = Program({"x": x, "y": y}, x.device)
    program.compute(lambda to, part, nothing: to.copy_(part * 2), program.slots[1], program.slots[0][3:], None)
    program.fill(program.slots[0][:2], 7)
    run(program, [x, y])
    assert y.tolist() == [6, 8, 10] and x.tolist() == [7, 7, 2, 3, 4, 5]
