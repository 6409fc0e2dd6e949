"""bench/history.py from end to end on a tiny model, and the users that it makes up."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import history
import pytest
from returning import NEW_TOKENS, Histories, visits_at_rate, zipf_visits

SMALL = ["--context", "200", "--known", "190", "--width", "4", "--repeats", "2", "--host-gib", "0.01"]
VISITS = ["--visits", "40", "--warm-up", "20", "--concurrency", "3", "--users", "12"]
ENGINE = ["--", "--device", "cpu", "--page-size", "8", "--max-total-tokens", "1600"]


def test_all_parts_are_measured_and_written(checkpoint: Path, tmp_path: Path) -> None:
    chosen = history.parse([str(checkpoint), *SMALL, *VISITS, "--save", str(tmp_path / "made.json"), *ENGINE])
    history.run(chosen, history.here)  # without the seconds that processes of their own take to start
    modes = json.loads((tmp_path / "made.json").read_text())["modes"]
    assert list(modes) == ["off", "on", "host"]
    off, on, host = modes.values()

    assert list(off["single"]) == ["nowhere"] and list(on["single"]) == ["nowhere", "device"]
    assert on["single"]["device"]["cached_tokens"] == [190 // 8 * 8] * 2  # whole pages
    for times in (*off["single"].values(), *on["single"].values(), off["cold"], on["cold"]):
        assert times["returned"] == 4 and 0 < times["total_ms"] <= times["call_ms"]
    for times in (off["single"]["nowhere"], on["single"]["nowhere"], off["cold"], on["cold"]):
        assert set(times["cached_tokens"]) == {0}
    assert len(on["cold"]["cached_tokens"]) == 3 * 2

    for name in ("zipf", "hits"):
        without, with_cache = off["replay"][name], on["replay"][name]
        for same in ("visits", "users", "prompt_tokens"):
            assert without[same] == with_cache[same]
        assert without["visits"] == 40 and 150 < without["prompt_tokens"] <= 200
        assert without["hit_requests"] == without["hit_tokens"] == 0
        assert 0 < with_cache["hit_tokens"] < with_cache["hit_requests"] < 1
        assert min(one["requests_per_s"] for one in (without, with_cache)) > 0
        assert 0 < with_cache["latency_p50_ms"] <= with_cache["latency_p99_ms"]
    assert off["users_that_fit"] == on["users_that_fit"] == 8

    assert list(host["single"]) == ["nowhere", "device", "host"]
    assert host["single"]["host"]["cached_tokens"] == [190 // 8 * 8] * 2
    assert on["replay"]["zipf"]["restored_tokens"] == 0 < host["replay"]["zipf"]["restored_tokens"]
    memory = on["memory"]
    assert memory["pages"] == 200 and memory["page_bytes"] == 8 * memory["token_bytes"] > 0
    assert 0 < memory["idle_pages"] == memory["cached_pages"] <= 200 and memory["evicted_pages"] > 0
    assert off["memory"]["cached_pages"] == off["memory"]["evicted_pages"] == 0
    rows = Counter(line.split(" | ")[0].strip("| ") for line in (tmp_path / "made.md").read_text().splitlines())
    assert rows["on"] == 2 + 1 + 1 and rows["zipf"] == rows["hits"] == len(modes)


def test_bad_options_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--context", "10", "--known", "10"], "--known 10 is not between 0 and --context 10"),
        (["--", "--page-size", "0"], "--page-size 0"),
    ):
        with pytest.raises(SystemExit):
            history.parse(["x", *options])
        assert message in capsys.readouterr().err


def test_histories_grow_and_begin_at_the_same_token_for_a_block() -> None:
    limit, block = 200, 60
    histories = Histories(1000, limit, block)
    prompts = [histories.visit(7) for _ in range(30)]
    moves = 0
    for before, after in itertools.pairwise(prompts):
        assert limit - block < len(after) <= limit
        kept = after[:-NEW_TOKENS]
        moved = len(before) - len(kept)
        assert kept == before[moved:] and moved in (0, block)
        moves += moved == block
    assert moves == 29 * NEW_TOKENS // block
    again = Histories(1000, limit, block)
    assert [again.visit(user) for user in (3, 7, 3, 7)][1::2] == prompts[:2]  # whoever else comes


def test_visits_are_as_popular_as_asked() -> None:
    visits = zipf_visits(50, 1.0, 100, 20_000)
    assert len(visits.warm_up) == 100 and set(visits.counted) == set(range(50))
    share = 1 / sum(1 / rank for rank in range(1, 51))
    counts = Counter(visits.counted)
    for rank in (1, 2, 10):
        assert counts[rank - 1] / 20_000 == pytest.approx(share / rank, rel=0.15)
    returning = visits_at_rate(5, 0.8, 10_000)
    assert returning.warm_up == list(range(5))
    once = [user for user in returning.counted if user >= 5]
    assert len(set(once)) == len(once) == pytest.approx(2000, abs=200)
    assert set(returning.counted) - set(once) == set(range(5))
