"""`pytest --softsm[=ARCH]`: Triton kernels of the tests run in softsm, every launch is checked, and a test fails on any
diagnostic. Tensors may be on the CPU or on device="cuda".

Installed as an entry point, so pytest loads this file always; it imports nothing of the emulator before the flag is
given. A test that expects a diagnostic opens `softsm.checking` itself: the innermost block gets the findings.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import pytest

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
DEFAULT = "sm_100a"
in_use: pytest.StashKey = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("softsm")
    what = "run Triton kernels in softsm and check every launch of a test's body; fail a test on any diagnostic"
    which = f"target: SOFTSM, else {DEFAULT}; or --softsm=ARCH"
    group.addoption("--softsm", action="store_const", const=DEFAULT, default="", help=f"{what} ({which})")
    for arch in ARCHITECTURES:  # options of their own: `--softsm tests` must not take the folder for an architecture
        group.addoption(
            f"--softsm={arch}", dest="softsm", action="store_const", const=f"={arch}", help=f"as --softsm, for {arch}"
        )
    group.addoption(
        "--softsm-order",
        default="latest",
        choices=("eager", "latest", "random"),
        help="completion of asynchronous operations under --softsm",
    )
    group.addoption("--softsm-seed", type=int, default=0, help="of --softsm-order random")
    group.addoption("--softsm-strict", action="store_true", help="follow PTX 9.4 literally (implies --softsm)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Runs before any test module is imported, as many ask at once whether there is a GPU."""
    option = early_config.known_args_namespace
    if not (option.softsm or option.softsm_strict):
        return
    if not getattr(option, "numprocesses", None) and "torch" not in sys.modules:
        _hand_over(early_config)
    asked = option.softsm.removeprefix("=") if option.softsm.startswith("=") else ""
    if os.environ.get("SOFTSM") and not asked:
        return  # softsm is in use from `import triton` on
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        return  # tests that load PTX themselves need neither
    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this process does not use the GPU, if there is one
    import torch

    from softsm.doors.triton.install import use

    early_config.stash[in_use] = use(asked or DEFAULT, cuda_shim=not torch.cuda.is_available())


def _hand_over(config: pytest.Config) -> None:
    """Lets `softsm serve` run the tests, if there is one; then this process ends here. Workers of pytest-xdist are
    processes of their own, which it cannot start."""
    from softsm import resident

    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    done = resident.hand_over("pytest", [str(x) for x in config.invocation_params.args])
    if done is not None:
        os._exit(done)
    if capture is not None:
        capture.resume_global_capture()


def pytest_unconfigure(config: pytest.Config) -> None:
    softsm = config.stash.get(in_use, None)
    if softsm is not None:
        softsm.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    option = item.config.option
    if not (option.softsm or option.softsm_strict):
        return (yield)
    from softsm.checks.checking import checking

    checks = checking(order=option.softsm_order, seed=option.softsm_seed, strict=option.softsm_strict)
    failed = True
    try:
        with checks as report:
            result = yield
        failed = False
    finally:
        text = _told(report)
        if text:
            item.user_properties.append(("softsm", ", ".join(sorted(set(report.codes())))))
            if failed:  # failed for another reason, which the findings may explain
                item.add_report_section("call", "softsm", text)
    if text:
        pytest.fail(text, pytrace=False)
    return result


def _told(report) -> str:
    """Returns the findings of a test. What was raised fails the test by itself, or was expected."""
    for warning in report.warnings:
        warnings.warn(f"softsm: {warning}", stacklevel=1)
    if not any(not d.raised for d in report):
        return ""
    from softsm.report.diagnostics import launches

    findings = "1 finding" if len(report) == 1 else f"{len(report)} findings"
    return f"softsm: {findings} in {launches(report.launches)}\n{report}"
