"""The variables of the environment."""

import pytest

from dsv4.runtime.settings import switched_on


def test_a_switch_is_0_or_1(monkeypatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("DSV4_CHECK", value)
        assert switched_on("DSV4_CHECK") is on
    monkeypatch.delenv("DSV4_CHECK")
    assert switched_on("DSV4_CHECK") is False
    for value in ("yes", "true", "2", "on"):  # else it would be off without a word
        monkeypatch.setenv("DSV4_CHECK", value)
        with pytest.raises(ValueError, match=f"^DSV4_CHECK: got '{value}'; accepted: 0, 1$"):
            switched_on("DSV4_CHECK")
