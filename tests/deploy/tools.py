"""What checks files of deployments and is no part of the package: `make deploy-test` wants all, other runs skip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"needs {tool}: see `make deploy-test`")


def accepts(*command: str | Path) -> None:
    """The tool has nothing to say against it."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(*paths: str) -> list[dict[str, object]]:
    """All YAML documents of files below deploy/."""
    return [one for path in paths for one in yaml.safe_load_all((DEPLOY / path).read_text())]
