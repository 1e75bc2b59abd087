"""What `dsv4 bench` says, from recorded measurements: the README's table is theirs, and the arithmetic is right."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import softsm
from dsv4 import bench as measuring
from dsv4 import reference
from dsv4.bench import backward, clock, drawn, humming, measured, peers, summary, timing
from dsv4.bench.dense import DenseCase
from dsv4.bench.moe import FLASH, MoeCase
from dsv4.bench.v4 import V4Case
from dsv4.bench.v41 import V41Case, V41Contest
from dsv4.bench.varlen import VarlenCase
from dsv4.commands import bench
from dsv4.reference import backward as reference_backward
from dsv4_command import app, usage

ROOT = Path(__file__).parents[2]
RECORDS = summary.records(ROOT / "benchmarks/results")
RECORD = RECORDS[0]
README = (ROOT / "README.md").read_text()


def test_the_table_in_the_readme_is_the_recorded_one():
    assert bench.replaced(README, RECORDS) == README, f"run: {bench.COMMAND}"


def test_a_file_without_marks_is_refused():
    with pytest.raises(usage.UsageError, match="--write: got a file without the marks"):
        bench.replaced("nothing here", RECORDS)


def test_what_was_recorded_are_cases_with_a_peer():
    assert RECORDS
    for record in RECORDS:
        names = {case.name for case in measuring.cases(**record.get("drawn", {"suite": "all"}))}
        for case in (case for case in record["cases"] if summary.has_peer(case)):
            assert case["case"] in names
            assert case["microseconds"]["dsv4"] > 0 and bench.best_peer(case) in case["microseconds"]


def test_kinds_are_ordered_by_operation_with_gradients_last():
    kinds = [
        "v4 decode fp8", "v4 prefill bf16", "prefill hd64", "random prefill hd64", "prefill hd128", "decode hd64",
        "varlen hd64", "index decode fp8", "compress", "moe flash", "backward v4", "backward hd64", "backward hd128",
        "random backward hd128", "varlen backward hd64",
    ]  # fmt: skip
    assert sorted(reversed(kinds), key=summary.place) == kinds
    shown = list(summary.speeds(RECORDS))
    assert shown == sorted(shown, key=summary.place)


def test_a_summary_counts_losses_and_wins_of_a_kind():
    def case(name: str, ours: float, **theirs: float) -> dict:
        return {"case": name, "microseconds": {"dsv4": ours, **theirs}}

    cases = [case("prefill full hd64", 2.0, a=1.0, b=3.0), case("prefill causal hd64 (1, 2:2, 9)", 1.0, a=4.0)]
    cases += [case("decode hd64", 1.0, a=n, b=2.0) for n in (1.0, 3.0, 4.0)]  # the fastest is not the same everywhere
    cases += [case("write 1 FP8 rows", 1.0, b=1.0), case("write 9 FP8 rows", 1.0)]  # the last has no peer
    record = {"device": "G", "torch": "1", "triton": "2", "ceilings": {}, "cases": cases}
    text = summary.table([record])
    assert "| prefill hd64 | 2 | a | 0.50x | 0.85x | 2.25x | 4.00x |" in text
    assert "| decode hd64 | 3 | b (2), a (1) | 1.00x | 1.20x | 2.00x | 2.00x |" in text
    assert "| write | 1 | b | 1.00x | 1.00x | 1.00x | 1.00x |" in text
    assert summary.is_record(record) and not summary.is_record([record])


def test_names_of_cases_are_different():
    names = [case.name for case in measuring.cases("all")]
    assert len(set(names)) == len(names)
    assert len(names) == sum(len(measuring.cases(suite)) for suite in measuring.SUITES)


def test_flops_and_bytes_of_a_case():
    full = DenseCase("x", 2, 4, 4, 8, 8, 64)
    assert full.flops == 4 * 2 * 4 * 8 * 8 * 64
    assert full.bytes == 2 * 2 * 64 * (2 * 8 * 4 + 2 * 8 * 4)
    causal = DenseCase("x", 1, 1, 1, 3, 5, 64, causal=True)  # queries see 3, 4 and 5 keys
    assert causal.flops == 4 * 12 * 64
    assert DenseCase("x", 1, 1, 1, 1, 5, 64, same_kv=True).bytes == 2 * 64 * (5 + 2)
    assert V4Case(2, 64, 128, 512, True).flops == 4 * 2 * 64 * 640 * 512
    assert V4Case(2, 64, 128, 512, True).bytes == 2 * 640 * 584


@pytest.mark.parametrize("gradient", [False, True])
def test_a_varlen_contest_tells_right_from_wrong(gradient):
    contest = VarlenCase(3, 4, 2, 5, 40, 64, gradient=gradient).on_device(device="cpu")
    name, call = next(contest.contenders())
    result = call()
    assert name == "dsv4" and contest.error(name, result) <= 1
    wrong = tuple(1.05 * x for x in result) if gradient else 1.05 * result
    assert contest.error(name, wrong) > 1


def test_bytes_of_experts():
    """One token reads the weights of its experts; many read those of all."""
    one, many = MoeCase(FLASH, 1), MoeCase(FLASH, 10_000)
    assert FLASH.expert_bytes == 13_369_344 and one.flops == 6 * 6 * 4096 * 2048
    assert one.bytes == pytest.approx(6 * 13_369_344, rel=0.02) and many.bytes == pytest.approx(256 * 13_369_344)
    assert MoeCase(FLASH, 128, zipf=True).bytes < 0.8 * MoeCase(FLASH, 128).bytes


def test_rows_of_experts_as_humming_takes_them():
    """Six slots of experts 0 and 2, by where experts begin, and by blocks of four slots that are one expert's."""
    product = object.__new__(humming._Product)
    product.form, product.tuning = "grouped_contiguous", {"block_shape": (4, 256, 128)}
    order, starts = torch.tensor([2, 0, 2, 2, 2, 2]).argsort(stable=True), torch.tensor([0, 1, 1, 6])
    assert product.places(order, starts)["expert_layout"] is starts
    product.form = "indexed"
    found = product.places(order, starts)
    assert found["sorted_ids"].tolist() == [1, 6, 6, 6, 0, 2, 3, 4, 5, 6, 6, 6]  # 6: no slot
    assert found["expert_ids"].tolist() == [0, 2, 2] and int(found["num_tokens_padded"]) == 12


@pytest.mark.parametrize("queries, other", [(3, "dsv4 584"), (513, "dsv4 bf16")])
def test_rows_of_v41_are_judged_by_their_own_values(queries, other):
    contest = V41Contest(V41Case(queries, 2, 5, 6, 100), "cpu")
    results = {name: call() for name, call in contest.contenders()}
    assert [*results] == ["dsv4", other]
    assert all(contest.error(name, result) < 1 for name, result in results.items())
    assert contest.error("dsv4", results[other]) > 1
    assert contest.case.bytes == queries * (5 * 528 + 6 * 288)


def test_gradients_are_checked_before_they_are_timed():
    case = DenseCase("x", 1, 4, 2, 40, 40, 64, causal=True)
    q, k, v = case.inputs("cpu")
    dense = backward.BackwardContest(case, q, k, v, torch.randn_like(q))
    v4 = backward.V4BackwardContest(backward.V4BackwardCase(10, 4, 6, 8), "cpu", 10)
    for contest, ours in ((dense, 3), (v4, 2)):
        calls = dict(contest.contenders())
        names = [name for name in ("dsv4", "dsv4 deterministic", "torch flash") if name in calls]
        assert len(names) == ours
        for name in names:
            found = calls[name]()
            assert contest.error(name, found) <= 1
            assert all(torch.equal(x, y) for x, y in zip(found, calls[name]()))  # the forward pass is kept
            for wrong in range(len(found) if contest is dense else 1):
                assert contest.error(name, [1.1 * x if n == wrong else x for n, x in enumerate(found)]) > 1
            assert contest.error(name, [x * float("nan") for x in found]) == float("inf")
    assert backward.BackwardCase(case).flops == 2.5 * case.flops
    assert backward.V4BackwardCase(2, 64, 128, 512).flops == 2.5 * V4Case(2, 64, 128, 512, True).flops


def test_gradients_of_ffpa_are_compared_in_the_layout_of_each_of_its_kernels(monkeypatch):
    asked = {}

    def attention(q, k, v, is_causal, enable_gqa, backend):
        asked[backend] = q.is_contiguous(), q.transpose(1, 2).is_contiguous()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    only = {"FFPA": SimpleNamespace(ffpa_attn_func=attention)}
    monkeypatch.setattr(peers, "module", only.get)
    case = DenseCase("x", 1, 4, 2, 40, 40, 512, causal=True)
    q, k, v = case.inputs("cpu")
    contest = backward.BackwardContest(case, q, k, v, torch.randn_like(q))
    calls = {name: call for name, call in contest.contenders() if name.startswith("FFPA")}
    assert all(contest.error(name, call()) <= 1 for name, call in calls.items())
    assert asked == {"cutedsl": (False, True), "triton": (True, False)}


def test_v4_gradients_of_a_peer_are_those_of_one_pool_and_a_turned_dout(monkeypatch):
    def wrapper(q, kv, out, dout, lse, sink, indices, softmax_scale):
        found = reference_backward.v4_attention(q, kv, indices, dout=dout, sink=sink, softmax_scale=softmax_scale)
        assert torch.allclose(out.float(), reference.v4_attention(q, kv, indices, sink=sink)[0].float(), atol=0.05)
        return {"dq": found.q, "d_sink": found.sink, "dkv": found.window}

    only = {"cuDNN frontend": SimpleNamespace(sparse_attention_backward_wrapper=wrapper)}
    monkeypatch.setattr(peers, "module", only.get)
    contest = backward.V4BackwardContest(backward.V4BackwardCase(10, 4, 6, 8), "cpu", 10)
    calls = dict(contest.contenders())
    assert [*calls] == ["dsv4", "dsv4 deterministic", "cuDNN frontend"]
    found = calls["cuDNN frontend"]()
    assert contest.error("cuDNN frontend", found) <= 1
    ours = calls["dsv4"]()
    assert [x.shape for x in found] == [ours[0].shape, ours[1].shape, torch.cat(ours[2:]).shape]


def test_slow_calls_have_fewer_turns_evenly_spread():
    assert timing.turns_of(0.001, 30) == set(range(30))
    assert timing.turns_of(0.1, 30) == {*range(2, 30, 3)}  # ten of them in a second
    assert timing.turns_of(60.0, 30) == {*range(5, 30, 6)} and timing.turns_of(60.0, 3) == {0, 1, 2}
    assert timing.turns_of(0.0, 2) == {0, 1}


def test_only_the_peers_that_are_asked_for_are_called(monkeypatch):
    monkeypatch.setattr(measured, "time_calls", lambda calls, repeats, mode: ({}, {}))
    found = measured.measure(FakeCase(), peers=["wrong", "absent"])
    assert [*found.errors, *found.refused] == ["dsv4", "wrong peer", "wrong peer", "absent peer"]


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = CliRunner().invoke(app, ["bench"], prog_name="dsv4")
    assert result.exit_code == 2 and "needs a GPU" in result.output


def test_a_suite_that_there_is_not_is_refused_in_words():
    result = CliRunner().invoke(app, ["bench", "--suite", "gemm"], prog_name="dsv4")
    assert (
        result.exit_code == 2
        and "--suite: got 'gemm'; accepted: dense, varlen, v4, index, moe, backward, all" in result.output
    )


def test_a_record_that_is_none_is_refused_in_words(tmp_path):
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "other").write_text("[1]")
    for name in ("text", "other", "absent"):
        result = CliRunner().invoke(app, ["bench", "--from", str(tmp_path / name)], prog_name="dsv4")
        assert result.exit_code == 2 and f"dsv4 bench: {tmp_path / name}: " in result.output


def test_a_case_without_peer_or_result_is_no_row():
    lone = RECORD | {
        "cases": [
            {"case": "x", "microseconds": who}
            for who in ({}, {"dsv4": 1.0}, {"dsv4": 1.0, "dsv4 deterministic": 2.0}, {"torch": 1.0})
        ]
    }
    assert bench.markdown(lone).endswith("|---|---|---|---|---|---|")


class FakeContest:
    def contenders(self):
        yield "dsv4", lambda: 0.5
        yield "peer", lambda: 0.25
        yield "wrong peer", lambda: 3.0
        yield "absent peer", self.refuse
        yield "broken peer", self.fail

    def refuse(self):
        raise NotImplementedError("not for this head dim")

    def fail(self):
        raise ImportError("cannot import name 'x'")

    def error(self, name, result):
        return result


class FakeCase:
    name, flops, bytes = "case", 2e9, 1e6

    def on_device(self, aot=None):
        return FakeContest()


def test_a_wrong_result_and_a_refusal_have_no_time(monkeypatch):
    def timed(calls, repeats, mode):
        return {name: timing.Sample(10.0 * n, 9.0, 12.0, 1700.0) for n, name in enumerate(calls, 1)}, {}

    monkeypatch.setattr(measured, "time_calls", timed)
    found = measuring.measure(FakeCase()).as_json()
    assert found["microseconds"] == {"dsv4": 10.0, "peer": 20.0}
    assert found["tflops"] == {"dsv4": 200.0, "peer": 100.0}
    assert found["megahertz"] == {"dsv4": 1700, "peer": 1700}
    assert found["errors"] == {"dsv4": 0.5, "peer": 0.25, "wrong peer": 3.0}
    assert found["refused"] == {
        "wrong peer": "wrong: its error is 3 of the bound",
        "absent peer": "not for this head dim",
        "broken peer": "cannot import name 'x'",
    }
    rows = bench.rows(found)
    assert rows[0][:3] == ("case", "dsv4", "10.0") and rows[1] == ("", "peer", "20.0", "100", "0.05", "1700", "2.00x")


def test_a_peer_is_found_by_any_of_its_modules(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "Peer", (("no_such_module_of_a_peer", "a_peer_of_this_test"), ("a-peer",)))
    assert peers.module("Peer") is None and peers.here()["Peer"] == "not installed"
    (tmp_path / "a_peer_of_this_test.py").write_text("__version__ = '1.5'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.here()["Peer"] == "1.5"
    assert peers.module("Peer").__version__ == "1.5"


def test_a_peer_that_does_not_fit_this_torch_is_absent_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "Peer", (("a_broken_peer_of_this_test",), ()))
    (tmp_path / "a_broken_peer_of_this_test.py").write_text("raise OSError('undefined symbol: xyz')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.module("Peer") is None
    assert peers.here()["Peer"] == "not usable: undefined symbol: xyz"
    assert "a_broken_peer_of_this_test" not in sys.modules


def test_the_clock_is_read_against_the_timer():
    stamps = torch.zeros(2, 4, dtype=torch.int64)
    with softsm.use("sm_90a"):
        clock.read_clock[(1,)](stamps[0], 500, num_warps=1)
    begin, end = stamps[0, :2], stamps[0, 2:]
    assert (end > begin).all() and end[1] - begin[1] >= 500
    assert timing.megahertz(torch.tensor([[10, 1000, 1760, 2000], [0, 0, 3500, 2000]])) == 1750.0


@pytest.mark.parametrize("suite", measuring.SUITES)
def test_cases_drawn_at_random_are_a_function_of_the_seed(suite):
    first, again, other = (measuring.cases(suite, seed, 12) for seed in (1, 1, 2))
    assert first == again != other
    assert len({case.name for case in first}) == 12
    assert all(0 < case.flops <= drawn.MOST_FLOPS and 0 < case.bytes <= drawn.MOST_BYTES for case in first)
    assert all(summary.kind(case.name) for case in first)


def test_the_worst_tenth_is_the_first_decile():
    assert summary.worst_tenth([3.0]) == 3.0
    assert summary.worst_tenth([float(n) for n in range(10, -1, -1)]) == pytest.approx(1.0)
