"""Rules about the source itself: who may import what, and no read-back on the way from prompt to result."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "widebeam"


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself (not inside functions)."""
    return {name for node in ast.parse(path.read_text()).body for name in imported(node)}


def imported(node: ast.AST) -> set[str]:
    """Modules that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module} if isinstance(node, ast.ImportFrom) and node.module else set()


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in PACKAGE.glob(pattern))


@pytest.mark.parametrize("path", files("model/*.py", "kv/*.py"), ids=lambda path: path.name)
def test_model_and_kv_know_no_beams_search_or_http(path: Path) -> None:
    banned = ("widebeam.engine", "widebeam.http", "widebeam.constraints", "widebeam.policies", "widebeam.client")
    assert not {name for name in imports(path) if name.startswith(banned)}


@pytest.mark.parametrize("path", files("engine/*.py"), ids=lambda path: path.name)
def test_engine_knows_nothing_of_http(path: Path) -> None:
    assert not {name for name in imports(path) if name.startswith(("widebeam.http", "aiohttp", "widebeam.client"))}


def test_only_deploy_knows_of_ray() -> None:
    knowing = {
        path.relative_to(PACKAGE).parts[0]
        for path in files("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if {"ray", "starlette"} & {name.split(".")[0] for name in imported(node)}
    }
    assert knowing == {"deploy"}


LIGHT = (
    "widebeam.client", "widebeam.http.protocol", "widebeam.engine.scheduler", "widebeam.engine.admission",
    "widebeam.constraints.catalog", "widebeam.policies", "widebeam.kv.prefix_cache", "widebeam.kv.rates",
    "widebeam.deploy.ray_config", "widebeam.plan.command",
)  # fmt: skip


def test_light_modules_import_no_torch() -> None:
    """In a fresh process: neither directly nor through anything that they import. Says which is the first that does."""
    code = (
        "import sys, importlib\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules: sys.exit(module)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


READ_BACKS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize"}
DEVICE_SIDE = files(
    "model/qwen3.py", "model/layers.py", "model/attention.py", "model/reference.py", "kv/*.py", "constraints/trie.py",
    "engine/step.py", "engine/advance.py", "engine/selection.py", "engine/scoring.py", "engine/vocabulary.py",
    "engine/state.py", "engine/pruning.py", "engine/diversity.py", "engine/noise.py", "engine/stochastic.py",
    "model/parallel.py",
)  # fmt: skip
DEVICE_SIDE.remove(PACKAGE / "kv" / "copies.py")  # copies beside the waves, which may have to be waited for


@pytest.mark.parametrize("path", DEVICE_SIDE, ids=lambda path: path.name)
def test_device_code_reads_nothing_back(path: Path) -> None:
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not calls & READ_BACKS


def test_public_names_resolve() -> None:
    import widebeam

    for name in widebeam.__all__:
        assert getattr(widebeam, name) is not None
    with pytest.raises(AttributeError):
        _ = widebeam.Enigne  # type: ignore[attr-defined]
