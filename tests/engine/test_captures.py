"""Warm-up on a device captures what later waves need, as is traced on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests import tiny
from tests.engine.warm_waves import (
    Recorder,
    graph_keys,
    make_large,
    make_runtime,
    make_search,
    pretending,
    soak,
)
from widebeam.constraints.catalog import Catalog
from widebeam.engine.captures import Captures
from widebeam.engine.compile import compiled_programs
from widebeam.engine.job import Job
from widebeam.engine.request import SearchResult
from widebeam.engine.runtime import Runtime
from widebeam.engine.shapes import token_rung
from widebeam.errors import OutOfMemory
from widebeam.kv.prefix import Prefix
from widebeam.model.config import load_model_config
from widebeam.model.tokenizer import Tokenizer
from widebeam.policies import PolicySpec, level_plan

pytestmark = pytest.mark.usefixtures("one_thread")
LONGEST = 300


@pytest.fixture(scope="module")
def shared_runtime(checkpoint: Path) -> tuple[Runtime, Recorder]:
    """Its functions are traced as they would be compiled, which takes seconds a form: once for all tests."""
    torch._dynamo.reset()
    recorder = Recorder()
    with pretending(recorder):
        runtime = make_runtime(
            checkpoint, LONGEST, max_wave_rows=64, max_beam_width=16, max_wave_tokens=512, max_total_tokens=4096,
            prefix_cache="on", warmup="none",
        )  # fmt: skip
    return runtime, recorder


@dataclass
class Pretended:
    """The shared runtime, and the integers that its functions have been called with in this test."""

    runtime: Runtime
    recorder: Recorder
    vocab_size: int

    @property
    def captured(self) -> int:
        return len(self.recorder.captured)

    def start(self, mode: Literal["fast", "none"] = "fast") -> Captures:
        """As a start does: nothing has been met before."""
        runtime, programs = self.runtime, self.runtime.core.programs
        runtime.prefixes.flush()
        programs.graphed.clear()
        programs.graphed.update(compiled_programs(runtime.core, lambda function: function).graphed)
        runtime._captures = captures = Captures(runtime.core, runtime.limits, mode, runtime._run_searches)
        captures.start(runtime.config.max_beam_width, self.vocab_size, LONGEST)
        return captures


@pytest.fixture
def pretended(checkpoint: Path, shared_runtime: tuple[Runtime, Recorder], monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Prompts of more than 256 tokens are large."""
    make_large(monkeypatch, 256, 480)
    runtime, recorder = shared_runtime
    monkeypatch.setattr("widebeam.engine.captures.made_so_far", recorder.made_so_far)
    recorder.captured.clear()
    return Pretended(runtime, recorder, load_model_config(checkpoint).vocab_size)


def test_graphs_are_told_apart(pretended: Pretended) -> None:
    """`graph_keys` says of any two waves whether they run the same graphs: what is traced agrees."""
    runtime, recorder = pretended.runtime, pretended.recorder
    pretended.start("none")
    specs: list[list[tuple[int, int, int, int, tuple[int, ...]]]] = [
        [(20, 20, 20, 3, ())],
        [(100, 18, 1, 3, ()), (28, 4, 4, 3, ())],
        [(200, 20, 20, 3, ())],
        [(20, 40, 20, 3, ())],
        [(20, 20, 20, 4, ())],
        [(20, 20, 20, 5, ())],
        [(20, 10, 10, 3, ()), (20, 9, 9, 2, ())],
        [(20, 20, 20, 3, (1,))],
        [(20, 20, 20, 3, (1, 2)), (20, 1, 1, 3, ())],
    ]
    traced: dict[frozenset[Any], set[Hashable]] = {}
    for spec in specs:
        searches = [
            make_search(np.arange(tokens) % 50, width, n, levels=levels, stops=stops)
            for tokens, width, n, levels, stops in spec
        ]
        recorder.last.clear()
        runtime.run([Job(search, 0.0, None) for search in searches])
        traced[frozenset(graph_keys(searches, runtime.limits))] = set(recorder.last)
    assert len(traced) >= 5
    for keys, graphs in traced.items():
        for other_keys, other_graphs in traced.items():
            both = keys & other_keys
            prompts = sum(key[0] == "prompts" for key in both)
            assert len(graphs & other_graphs) == len(both) + prompts  # prompts have two graphs


def test_no_graph_is_made_after_warm_up(checkpoint: Path, tmp_path: Path, pretended: Pretended) -> None:
    """Each function is traced as it would be compiled, and the integers that it is called with are noted."""
    runtime = pretended.runtime
    pretended.start()
    while runtime.capture_more():
        pass
    path = tiny.save_catalog(tmp_path / "wide.jsonl", num_items=100)
    catalog = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    captured = pretended.captured
    soak(runtime, catalog, 150, 0, pretended.vocab_size)
    assert (runtime.fallbacks, pretended.captured) == (0, captured)
    assert captured > 20
    rows = path.read_text().splitlines()
    path.write_text("\n".join(row.replace("<c_15>", "<c_3>").replace("item-9", "new-9") for row in rows))
    update = Catalog.load(path, token_id=Tokenizer(checkpoint).token_id)
    assert not np.array_equal(update.index.code, catalog.index.code)
    runtime.core.beams.high_water = 0
    runtime.add_catalog(update)
    assert runtime.core.beams.high_water == 0  # no wave ran
    soak(runtime, update, 30, 1, pretended.vocab_size)
    assert (runtime.fallbacks, pretended.captured) == (0, captured)


def test_policies_are_compiled_at_start(
    checkpoint: Path, catalog_file: Path, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is wanted: each policy's first request, wider than in warm-up, compiles nothing."""
    runtime, recorder = pretended.runtime, pretended.recorder
    monkeypatch.setattr(Runtime, "_warms_up_policies", True)
    pretended.start()
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    runtime.add_catalog(catalog)
    compiled = len(recorder.compiled)
    for name, fields in {
        "fixed": {}, "score_margin": {"margin": 2.5}, "nucleus": {"mass": 0.5}, "diverse": {"cap": 2}, "stochastic": {},
    }.items():  # fmt: skip
        plan = level_plan(PolicySpec(name=name, **fields), 3, 12)  # type: ignore[arg-type]
        search = replace(make_search(np.arange(20), 12, 12, catalog=catalog), plan=plan)
        found = runtime.run([Job(search, 0.0, None)])[0].result
        assert isinstance(found, SearchResult) and found.sequences
    assert len(recorder.compiled) == compiled


def test_large_prompts_are_captured_later(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then larger ones serve; either way the search is the same."""
    monkeypatch.setattr(Captures, "_missing", lambda *_: None)  # traffic waits for none
    runtime = pretended.runtime
    pretended.start()
    programs = runtime.core.programs

    def sizes() -> list[int | None]:
        return [programs.rung(16, tokens, 0) for tokens in (1, 129, 257, 321, 480, 481)]

    def results() -> list[Any]:
        jobs = [Job(make_search(np.arange(150) * (b + 7) % 50, 8, 8), 0.0, None) for b in range(3)]
        return [[(s.token_ids, s.score) for s in outcome.result.sequences] for outcome in runtime.run(jobs)]

    captured, padded = pretended.captured, results()
    assert (sizes(), pretended.captured) == ([128, 256, 480, 480, 480, 640], captured)
    while runtime.capture_more():
        pass
    assert sizes() == [128, 256, 320, 480, 480, 640]
    captured, graphed = pretended.captured, results()
    assert pretended.captured == captured and runtime.fallbacks == runtime.late_graphs == 0
    for one, other in zip(padded, graphed, strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


def large_wave(runtime: Runtime, tokens: int) -> Any:
    """One result of two prompts with so many tokens together."""
    jobs = [Job(make_search(np.arange(tokens // 2) * (b + 7) % 50, 8, 8), 0.0, None) for b in range(2)]
    return runtime.run(jobs)[0].result


def test_traffic_waits_for_a_capture_now_and_then(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody ever stops asking: the first size that comes, and no other for a while."""
    make_large(monkeypatch, 128, 640)
    runtime, captures, programs = pretended.runtime, pretended.start(), pretended.runtime.core.programs
    captured = pretended.captured
    assert [programs.rung(16, tokens, 0) for tokens in (300, 400)] == [640, 640]
    first = large_wave(runtime, 300)
    assert programs.rung(16, 300, 0) == 320 and pretended.captured == captured + 2
    assert large_wave(runtime, 300).sequences == first.sequences
    large_wave(runtime, 400)
    assert programs.rung(16, 400, 0) == 640 and pretended.captured == captured + 2
    monkeypatch.setattr("widebeam.engine.captures.EVERY_S", 0.0)
    large_wave(runtime, 400)
    large_wave(runtime, 400)
    assert programs.rung(16, 400, 0) == 480 and pretended.captured == captured + 4
    assert captures.late_graphs == captures.fallbacks == captures.ungraphed_prompts == 0


def test_what_is_compiled_beside_a_capture_in_traffic_is_counted(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, as in any other wave."""
    make_large(monkeypatch, 128, 640)
    runtime, captures, recorder = pretended.runtime, pretended.start(), pretended.recorder
    pack = runtime.core.programs.pack._program  # type: ignore[attr-defined]

    def compiling(*args: Any) -> None:
        recorder.compiled.append("pack")
        pack(*args)

    with monkeypatch.context() as patched:
        patched.setattr(runtime.core.programs.pack, "_program", compiling)
        large_wave(runtime, 300)
    large_wave(runtime, 300)
    assert runtime.core.programs.rung(16, 300, 0) == 320
    assert (captures.fallbacks, captures.late_graphs) == (1, 0) and "which costs seconds once" in caplog.text


def test_a_start_says_what_all_its_steps_took(pretended: Pretended, caplog: pytest.LogCaptureFixture) -> None:
    """Those of prompts, too: the last line has all that was made."""
    with caplog.at_level("INFO", "widebeam"):
        pretended.start()
    lines = [line for line in caplog.messages if line.startswith("warm-up: ")]
    assert len(lines) == 2 and lines[-1].endswith(str(pretended.recorder.made_so_far(torch.device("cpu"))))


def test_a_capture_that_fails_in_traffic_fails_no_other_wave(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other size is tried. What finds no graph at all is counted."""
    make_large(monkeypatch, 128, 640)
    monkeypatch.setattr("widebeam.engine.captures.EVERY_S", 0.0)
    runtime, captures, programs = pretended.runtime, pretended.start(), pretended.runtime.core.programs

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(programs.body, "_program", no_room)
        large_wave(runtime, 300)
    runtime.check_integrity()
    for tokens in (300, 400):
        assert large_wave(runtime, tokens).sequences and programs.rung(16, tokens, 0) == 640
    assert (captures.fallbacks, captures.ungraphed_prompts, runtime.capture_more()) == (1, 0, False)
    programs.graphed.discard((16, 640, 0))
    assert large_wave(runtime, 300).sequences and captures.ungraphed_prompts == 1
    assert captures.late_graphs == 0


def test_padding_behind_prefixes_changes_no_result(pretended: Pretended) -> None:
    """What is new takes the next larger size that has a graph."""
    runtime = pretended.runtime
    pretended.start()
    assert [runtime.core.programs.rung(16, tokens, 1) for tokens in (129, 257, 481)] == [256, 480, 640]

    def results() -> list[Any]:
        searches = [make_search(np.arange(170) * (b + 7) % 50, 8, 8) for b in range(3)]
        searches[0].prefix = Prefix.of(searches[0].token_ids, runtime.config.page_size)
        outcomes = runtime.run([Job(search, 0.0, None) for search in searches])
        return [[(s.token_ids, s.score) for s in outcome.result.sequences] for outcome in outcomes]

    cold, captured = results(), pretended.captured
    padded = results()  # 382 new tokens
    assert pretended.captured == captured and runtime.fallbacks == runtime.late_graphs == 0
    runtime.core.programs.graphed.clear()
    for one, *others in zip(cold, padded, results(), strict=True):
        for other in others:
            assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
            assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


def test_what_returns_needs_no_graph_that_warm_up_has_not_met(pretended: Pretended) -> None:
    """Hits of one page and of more, alone and in company of whoever is new."""
    runtime = pretended.runtime
    pretended.start()
    assert len(runtime.core.context.cache or ()) == 0

    def run(*prompts: Any) -> list[int]:
        searches = [make_search(tokens, 8, 8) for tokens in prompts]
        for search in searches:
            search.prefix = Prefix.of(search.token_ids, runtime.config.page_size)
        runtime.run([Job(search, 0.0, None) for search in searches])
        return [search.num_cached for search in searches]

    users = [np.arange(length) * (b + 3) % 50 for b, length in enumerate((70, 200, 290))]
    new = [np.arange(200) * step % 50 for step in (11, 13, 17)]
    assert run(*users) == [0, 0, 0]
    captured = pretended.captured
    assert run(*users) == [64, 192, 256]
    assert run(np.append(users[0], np.arange(90) % 50)) == [64] and run(users[2][:150], users[1][:10]) == [128, 0]
    assert run(users[0], new[0]) == [64, 0] and run(users[1], new[1], new[2]) == [192, 0, 0]
    assert pretended.captured == captured and runtime.fallbacks == runtime.late_graphs == 0


def test_hits_of_long_prefixes_are_met(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that attention cuts, up to the last token that a context has room for."""
    for module in ("shapes", "warmup"):
        monkeypatch.setattr(f"widebeam.engine.{module}.SPLIT_CONTEXT", 128)
    runtime = pretended.runtime
    pretended.start()
    captured, user = pretended.captured, np.arange(129) * 3 % 50
    for more in (0, 1, 100, 150, LONGEST - 129 - 3):
        search = make_search(np.append(user, (np.arange(more) + more) % 41), 8, 8)
        search.prefix = Prefix.of(search.token_ids, runtime.config.page_size)
        runtime.run([Job(search, 0.0, None)])
        assert search.num_cached == (128 if more else 0)
    assert pretended.captured == captured and runtime.fallbacks == runtime.late_graphs == 0


@pytest.mark.parametrize("cache", ["on", "off"])
def test_prompts_are_not_padded_without_bound(
    checkpoint: Path, uncompiled: None, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where warm-up needs many requests for so many tokens, and where full waves end between two rungs."""
    common, step = 512, 320
    make_large(monkeypatch, common, step)
    runtime = make_runtime(
        checkpoint, 30, prefix_cache=cache, page_size=8, max_wave_requests=64, max_wave_rows=64, max_beam_width=4,
        max_wave_tokens=1250, max_total_tokens=8192,
    )  # fmt: skip
    programs, found = runtime.core.programs, 0
    for requests, tokens, splits in itertools.product((16, 64), (1, 100, 400, 600, 1100, 1250), (0, 1)):
        rung = programs.rung(requests, tokens, splits)
        assert rung is None or tokens <= rung < tokens + step
        assert rung is None or tokens > common or rung == token_rung(tokens)
        found += rung is not None
    assert programs.rung(16, 600, 0) is programs.rung(16, 600, 1) is None  # 16 requests cannot have as many
    assert found == (2 * (2 * 3 + 3) if cache == "on" else 2 * 3 + 3)


def test_no_room_for_more_graphs(
    checkpoint: Path, catalog_file: Path, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large prompts then stay without, which counts; a catalog is refused, and met in full when it comes again."""
    runtime, captures = pretended.runtime, pretended.start()
    catalog = Catalog.load(catalog_file, token_id=Tokenizer(checkpoint).token_id)
    graphed = set(runtime.core.programs.graphed)

    def no_room(_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(captures, "_run", no_room)
        assert runtime.capture_more() and not runtime.capture_more()
        with pytest.raises(OutOfMemory, match="graphs of catalog"):
            runtime.add_catalog(catalog)
    assert (runtime.fallbacks, runtime.core.programs.graphed) == (1, graphed)
    captured = pretended.captured
    runtime.add_catalog(catalog)
    met = pretended.captured
    assert met > captured
    runtime.run([Job(make_search(np.arange(20), 8, 8, catalog=catalog), 0.0, None)])
    assert (pretended.captured, runtime.fallbacks, runtime.late_graphs) == (met, 1, 0)


def test_what_returns_stays_without_graphs_where_there_is_no_room(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is tried again in traffic, where it would fail a wave."""

    meet = Captures._meet

    def no_room(self: Captures, searches: Any) -> None:
        if any(search.num_cached for search in searches):
            raise torch.OutOfMemoryError("no room")
        meet(self, searches)

    monkeypatch.setattr(Captures, "_meet", no_room)
    captures = pretended.start()
    programs = pretended.runtime.core.programs
    assert captures.fallbacks == 1 and programs.rung(16, 100, 0) == 128
    assert {splits for _, _, splits in programs.graphed} == {0}
