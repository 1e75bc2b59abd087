import pytest

from softsm.doors.cuda.compile import CompileError, find_clang


@pytest.fixture(scope="session")
def clang():
    """Skips tests on a machine without clang."""
    try:
        return find_clang()
    except CompileError as problem:
        pytest.skip(str(problem))
