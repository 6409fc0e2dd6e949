"""Whether a restore pays, and the rates that say so."""

from __future__ import annotations

import pytest

from widebeam.kv.rates import PrefillRate, restore_pays


def test_whether_a_restore_pays() -> None:
    assert restore_pays(64, 1000, bytes_per_s=1001.0, tokens_per_s=64.0)
    assert not restore_pays(64, 1000, bytes_per_s=999.0, tokens_per_s=64.0)
    assert not restore_pays(64, 1000, bytes_per_s=1001.0, tokens_per_s=65.0)
    assert restore_pays(64, 1000, 1.0, 0.0) and restore_pays(64, 1000, 0.0, 1.0)


def test_the_rate_of_prefill_is_that_of_large_waves() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    for _ in range(100):
        rate.note(10_000, 0.1)
        rate.note(10, 0.01)
    assert rate.tokens_per_s == pytest.approx(100_000, rel=0.01)
    for _ in range(400):
        rate.note(10, 0.01)
    assert rate.tokens_per_s < 5000, "none has come for long"
