"""bench/simulate.py against what is known in closed form, and its reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import report
import simulate
from returning import NEW_TOKENS
from returning import Histories as RealHistories
from routing import Cache, Histories, Router, Visit

from widebeam.plan.waves import WaveModel, WaveTime
from widebeam.plan.work import Prompt


class FixedWaves:
    """Waves of one request each, since one is as wide as a wave may be."""

    width = 8192

    def time(self, prompts: Sequence[Prompt]) -> WaveTime:
        assert len(prompts) == 1
        return WaveTime(15.0, 5.0)


def test_one_replica_with_waves_of_one_is_m_d_1() -> None:
    """Mean wait rho * service / (2 * (1 - rho)) (Pollaczek and Khinchine)."""
    fleet = simulate.Fleet(cast(WaveModel, FixedWaves()), Router("least", 1), 0)
    rho, service_s = 0.6, 0.02
    fleet.serve((Visit(user, range(100)) for user in range(40_000)), rate=rho / service_s)
    mean_s = sum(visit.ended - visit.arrived for visit in fleet.done) / len(fleet.done)
    assert mean_s - service_s == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.05)


def test_a_router_of_fixed_cost_bounds_all_replicas() -> None:
    fleet = simulate.Fleet(cast(WaveModel, FixedWaves()), Router("least", 8), 0, router_ms=10.0)
    fleet.serve((Visit(user, range(100)) for user in range(2000)), concurrency=64)
    assert fleet.summary(200)["requests_per_s"] == pytest.approx(100.0, rel=0.02)  # 8 replicas could do 400


@pytest.mark.parametrize("replicas", [2, 7])
def test_another_replica_takes_its_share_of_users_and_moves_no_other(replicas: int) -> None:
    before, after = (Router("hash-160", count) for count in (replicas, replicas + 1))
    idle = [0] * (replicas + 1)
    homes = [(before.choose(user, idle[:-1]), after.choose(user, idle)) for user in range(4000)]
    moved = [new for old, new in homes if new != old]
    assert len(moved) / len(homes) == pytest.approx(1 / (replicas + 1), rel=0.25)
    assert set(moved) == {replicas}


def test_bounded_load_goes_on_along_the_ring() -> None:
    plain, bounded = Router("hash-160", 4), Router("bounded-150", 4)
    home = plain.choose(7, [0] * 4)
    loads = [2] * 4
    assert bounded.choose(7, loads) == home  # 2 < 1.5 * 9 / 4
    loads[home] = 8
    other = bounded.choose(7, loads)
    assert other != home and plain.choose(7, loads) == home
    assert Router("least", 4).choose(7, [3, 1, 2, 2]) == 1


@pytest.mark.parametrize("policy", ["hsh-16", "hash", "hash-0", "bounded-100", "least-2"])
def test_unknown_policies_are_refused(policy: str) -> None:
    with pytest.raises(SystemExit, match=policy):
        Router(policy, 2)


def test_histories_are_as_long_as_the_benchmark_s_own() -> None:
    """From where both begin alike: the beginning moves by a block, once in block / NEW_TOKENS visits."""
    real, made = RealHistories(50, 200, 100), Histories(200, 100)
    real.visit(3)
    made.visit(3)
    made._dropped[3] = real._dropped[3]
    for _ in range(12):
        assert len(real.visit(3)) == len(made.visit(3))
    assert NEW_TOKENS * 12 > 100


def test_a_cache_finds_whole_pages_of_the_same_beginning_and_forgets_the_oldest() -> None:
    cache = Cache(300, 10)
    cache.keep(Visit(1, range(105)))
    assert cache.look_up(Visit(1, range(125))) == 100
    assert cache.look_up(Visit(1, range(100))) == 90  # the last token is always computed
    assert cache.look_up(Visit(1, range(20, 125))) == 0 == cache.look_up(Visit(2, range(105)))
    cache.keep(Visit(2, range(100)))
    cache.keep(Visit(1, range(100)))
    cache.keep(Visit(3, range(150)))
    assert [cache.look_up(Visit(user, range(200))) for user in (1, 2, 3)] == [100, 0, 150]


def test_policies_are_compared_and_written(tmp_path: Path) -> None:
    chosen = simulate.parse(
        ["qwen3-4b", "--replicas", "2", "--policies", "random", "hash-160", "--exponents", "0.6", "--visits", "100",
         "--warm-up", "300"]
    )  # fmt: skip
    made = report.header(chosen) | {"rows": [*simulate.compare(chosen)]}
    report.save(tmp_path / "made.json", made, simulate.markdown(made))
    spread, hashed = json.loads((tmp_path / "made.json").read_text())["rows"]
    assert spread["policy"] == "random" and hashed["hit_tokens"] > spread["hit_tokens"] > 0
    assert "hash-160" in (tmp_path / "made.md").read_text()
    assert made["rows"] == [*simulate.compare(chosen)]  # seeded


def test_levels_of_a_report_stand_beside_their_prediction(tmp_path: Path) -> None:
    level = {"requests_per_s": 30.0, "latency_p50_ms": 130.0, "latency_p99_ms": 150.0, "offered_per_s": 5.0}
    arguments = {"context": "5000", "width": "256", "tokens": "3", "mixed": "False"}
    levels = [level | {"load": "closed 4", "kind": "closed"}, level | {"load": "open 5/s", "kind": "open"}]
    (tmp_path / "online.json").write_text(json.dumps({"arguments": arguments, "levels": levels}))
    chosen = simulate.parse(["qwen3-1.7b", "--replicas", "1", "--validate", str(tmp_path / "online.json")])
    with pytest.raises(SystemExit):
        simulate.parse(["qwen3-1.7b", "--validate", str(tmp_path / "online.json")])
    closed, open_ = simulate.validate(chosen)
    assert closed["requests_per_s measured"] == 30.0
    assert 25 < closed["requests_per_s predicted"] < 35  # at least one and at most four a wave
    assert open_["requests_per_s predicted"] == pytest.approx(5.0, rel=0.1)
