"""Dashboard and alerts: they speak of metrics that a real server has, and promtool agrees with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.deploy.tools import DEPLOY, ROOT, accepts, documents, needs
from tests.http.hostile import GOOD
from tests.http.service import running_service
from widebeam import errors

ALERTS, CASES = DEPLOY / "prometheus" / "alerts.yaml", ROOT / "tests" / "deploy" / "alerts_test.yaml"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "widebeam.json").read_text())


def rules() -> list[dict[str, Any]]:
    (document,) = documents("prometheus/alerts.yaml")
    return [rule for group in document["groups"] for rule in group["rules"]]  # type: ignore[attr-defined]


def expressions() -> list[str]:
    of_panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    of_variables = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return of_panels + of_variables + [rule["expr"] for rule in rules()]


@pytest.fixture(scope="module")
def samples(checkpoint: Path, catalog_file: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Labels of the samples of a real server, by name."""
    with running_service(checkpoint, catalog_file) as service:
        assert service.post("/v1/recommend", GOOD).status == 200
        text = service.get("/metrics").content.decode()
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    yield found


def test_every_metric_is_one_of_a_real_server(samples: dict[str, list[dict[str, str]]]) -> None:
    named = {name for expression in expressions() for name in re.findall(r"\bwidebeam_\w+", expression)}
    assert len(named) > 40
    in_words = set(re.findall(r"`(widebeam_\w*[a-z])`", OPERATIONS))
    histograms = {name.removesuffix("_bucket") for name in samples if name.endswith("_bucket")}
    assert named <= set(samples) and in_words <= set(samples) | histograms


def test_every_label_is_one_of_its_metric(samples: dict[str, list[dict[str, str]]]) -> None:
    """Those chosen in braces, with values that the server has, and those that sums go by."""
    of_prometheus = {"job", "instance"}
    for expression in expressions():
        for name, chosen in re.findall(r"\b(widebeam_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)[=!]", chosen))
            assert labels - of_prometheus <= {label for sample in samples[name] for label in sample}, expression
        (names, by) = set(re.findall(r"\bwidebeam_\w+", expression)), set(re.findall(r" by \(([^)]*)\)", expression))
        for label in {label.strip() for group in by for label in group.split(",")} - of_prometheus:
            assert all(any(label in sample for sample in samples[name]) for name in names), (label, expression)


def test_outcomes_and_states_are_those_of_the_server(samples: dict[str, list[dict[str, str]]]) -> None:
    kinds = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}
    states = {sample["state"] for sample in samples["widebeam_engine_state"]}
    for expression in expressions():
        for label, values in re.findall(r'\b(outcome|state)[=!]~?"([^"]+)"', expression):
            assert set(values.split("|")) <= (states if label == "state" else kinds | {"ok"}), expression


def test_every_alert_has_a_test_and_an_entry_in_the_documents() -> None:
    named = {rule["alert"] for rule in rules()}
    assert named == set(re.findall(r'alertname="(\w+)"', CASES.read_text()))
    assert named == set(re.findall(r"`(WideBeam[A-Z]\w+)`", OPERATIONS))


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana asks of one: ids that differ, panels that do not overlap, and a data source that is chosen there."""
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    charts = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in charts)


@needs("promtool")
def test_promtool_accepts_the_rules_and_each_fires_where_it_should() -> None:
    accepts("promtool", "check", "rules", ALERTS)
    accepts("promtool", "test", "rules", CASES)


@needs("promtool")
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """As rules, with Grafana's variables filled in."""
    filled = [
        expression.replace("$__rate_interval", "1m").replace("$job", "widebeam").replace("$instance", ".*")
        for expression in expressions()
        if "label_values" not in expression
    ]
    rules = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(filled)]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    accepts("promtool", "check", "rules", tmp_path / "rules.json")


@needs("promtool")
def test_promtool_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    for path in (DEPLOY / "prometheus").glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "api-key").write_text("a-key-of-the-deployment-tests")
    accepts("promtool", "check", "config", tmp_path / "prometheus.yaml")
