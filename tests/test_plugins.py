"""What other distributions offer: found by entry points of real ones, and harmless if it is broken."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from widebeam import Engine, SearchParams
from widebeam.errors import ConfigError, EngineError, InvalidRequest
from widebeam.kv.eviction import EVICTION
from widebeam.policies import POLICIES, PolicySpec
from widebeam.registry import Registry

DOC = (Path(__file__).resolve().parent.parent / "docs" / "policies.md").read_text()
BLOCK = re.compile(r'^```\w+ title="(.+?)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
GOOD = """
from widebeam.policies import LevelPlan

def narrow(spec, levels, beam_width):
    return LevelPlan((2,) * levels)
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test finds is gone after it."""
    for found in (POLICIES, EVICTION):
        monkeypatch.setattr(found, "_plugins", {})


def install(
    folder: Path, patch: pytest.MonkeyPatch, name: str, code: str, offers: dict[str, str], group: str = "policies"
) -> None:
    """A distribution as an installer leaves it: a module, and what describes it."""
    folder = folder / name
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{policy} = {target}\n" for policy, target in offers.items()]
    (info / "entry_points.txt").write_text(f"[widebeam.{group}]\n" + "".join(lines))
    patch.syspath_prepend(str(folder))


def registry() -> Registry[object]:
    made: Registry[object] = Registry("policy", group="widebeam.policies")
    made.add("fixed", "widebeam.policies.fixed:fixed")
    return made


def test_two_of_one_name_are_refused_by_their_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "plug_one", GOOD, {"narrow": "plug_one:narrow"})
    found = registry()
    found.discover()
    assert found.names() == ["fixed", "narrow"] and callable(found.get("narrow"))
    install(tmp_path, monkeypatch, "plug_two", GOOD, {"narrow": "plug_two:narrow"})
    with pytest.raises(ConfigError, match=r"'narrow' is offered by both plug_(one|two) .* and plug_(two|one) "):
        found.discover()
    with pytest.raises(KeyError, match=r"known are fixed, narrow; did you mean 'narrow'"):
        found.get("narow")
    assert Registry("policy").names() == []


async def test_an_engine_does_not_start_where_a_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    install(tmp_path, monkeypatch, "plug_shadow", GOOD, {"nucleus": "plug_shadow:narrow"})
    with pytest.raises(
        ConfigError, match=r"'nucleus' of plug_shadow \(plug_shadow:narrow\) has the name of a built-in"
    ):
        await Engine(str(checkpoint), device="cpu").start()


async def test_a_broken_one_fails_only_who_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offers = {"gone": "plug_broken:gone", "narrow": "plug_broken:narrow", "lost": "plug_nowhere:x"}
    install(tmp_path, monkeypatch, "plug_broken", GOOD, offers)
    async with Engine(str(checkpoint), device="cpu") as engine:
        assert "'gone' of plug_broken" in caplog.text and "plug_nowhere" in caplog.text
        for name in ("gone", "lost"):
            with pytest.raises(EngineError, match=rf"{name}.* of plug_broken .* cannot be imported") as failed:
                await engine.submit([5, 6], SearchParams(policy=PolicySpec(name=name), max_new_tokens=2))
            assert failed.value.code == "broken_plugin"
        for name, width in (("narrow", 2), ("fixed", 1)):
            result = await engine.submit([5, 6], SearchParams(policy=PolicySpec(name=name), max_new_tokens=2))
            assert result.widths == (width, width)
        with pytest.raises(InvalidRequest, match="known are diverse, fixed, gone, lost, narrow"):
            await engine.submit([5, 6], SearchParams(policy=PolicySpec(name="other")))


async def test_an_eviction_policy_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """The page that comes last goes first, so that the first prompt stays however many come behind it."""
    code = "def newest(page):\n    return -page.last_used\n"
    offers = {"newest": "plug_evict:newest", "gone": "plug_evict:gone"}
    install(tmp_path, monkeypatch, "plug_evict", code, offers, "eviction")
    settings: dict[str, Any] = {"device": "cpu", "prefix_cache": "on", "page_size": 4, "max_total_tokens": 48,
                                "max_context_len": 24}  # fmt: skip
    hits = {}
    for name in ("newest", "lru"):
        async with Engine(str(checkpoint), prefix_cache_eviction=name, **settings) as engine:
            for first in (1, 2, 3, 4, 5, 6, 7, 1):
                result = await engine.submit([first] * 16, SearchParams(beam_width=2, max_new_tokens=2))
            hits[name] = result.cached_tokens
    assert hits == {"newest": 12, "lru": 0}
    for name, message in (("newst", "did you mean 'newest'"), ("gone", "'gone' of plug_evict .* cannot be imported")):
        with pytest.raises(ConfigError, match=f"--prefix-cache-eviction: .*{message}"):
            await Engine(str(checkpoint), prefix_cache_eviction=name, **settings).start()


async def test_the_documented_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, catalog_file: Path
) -> None:
    blocks = dict(BLOCK.findall(DOC))
    offers = tomllib.loads(blocks["pyproject.toml"])["project"]["entry-points"]["widebeam.policies"]
    install(tmp_path, monkeypatch, "my_policies", blocks["my_policies.py"], offers)
    async with Engine(str(checkpoint), catalog=str(catalog_file), device="cpu") as engine:
        policy = PolicySpec(name="explore", cap=2)
        result = await engine.submit([5, 6, 7], SearchParams(n=8, beam_width=8, policy=policy))
        first = [sequence.token_ids[0] for sequence in result.sequences]
        assert result.widths == (6, 8, 8) and max(map(first.count, first)) <= 2
        with pytest.raises(InvalidRequest) as refused:
            await engine.submit([5, 6, 7], SearchParams(policy=PolicySpec(name="explore")))
        assert refused.value.param == "policy.cap"
