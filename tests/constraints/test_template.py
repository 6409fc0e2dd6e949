"""History templates against a rendering of the whole prompt as one string."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.constraints.catalog_files import write_header, write_jsonl
from widebeam.constraints.catalog import Catalog
from widebeam.constraints.template import HistoryPrompt, HistoryTemplate
from widebeam.errors import CatalogError, InvalidRequest
from widebeam.model.tokenizer import Tokenizer

ROWS: list[dict[str, Any]] = [
    {"item_id": 1, "sid": [100, 110], "title": "red car"},
    {"item_id": "two", "sid": [100], "title": "blue"},
    {"item_id": 3, "sid": [101, 110, 120], "title": "a {braced} name"},
    {"item_id": 4, "sid": [100, 110], "title": None},
    {"item_id": "5", "sid": [101, 111]},
]
SIDS = {str(row["item_id"]): row["sid"] for row in ROWS}
TITLES = {str(row["item_id"]): row.get("title") or "" for row in ROWS}
WORDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    """A word-level tokenizer: splits at blanks and knows every word."""
    return [WORDS.setdefault(word, 1000 + len(WORDS)) for word in text.split()]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog.load(write_jsonl(tmp_path_factory.mktemp("template") / "items.jsonl", ROWS))


def spell(template_item: str, item: str) -> str:
    sid = "".join(f" #{token} " for token in SIDS[item])
    values = {"{{": "{", "}}": "}", "{item_id}": item, "{title}": TITLES[item], "{sid}": sid}
    return re.sub(r"\{\{|\}\}|\{\w+\}", lambda match: values[match[0]], template_item)


def naive(template: HistoryTemplate, history: list[int | str], max_tokens: int) -> HistoryPrompt | None:
    """Spell every prompt out as text, longest history first, until one fits; None if none does."""
    known = [str(item) for item in history if str(item) in SIDS]
    unknown = [item for item in history if str(item) not in SIDS]
    most = min(len(known), max_tokens, template.max_items or len(known))
    for count in range(most, -1, -1):
        texts = [spell(template.item, item) for item in known[len(known) - count :]]
        text = template.prefix + template.separator.join(texts) + template.suffix
        tokens = [int(word[1:]) if word[0] == "#" else encode(word)[0] for word in text.split()]
        if len(tokens) <= max_tokens:
            return HistoryPrompt(
                token_ids=tokens, num_used=count, num_dropped=len(known) - count, unknown=unknown,
                at_max_items=len(known) > count == template.max_items,
            )  # fmt: skip
    return None


TEXTS = st.sampled_from(["", " ", ", ", "seen ", " then ", "{sid}", " }{ ", "x"])
ITEMS = st.sampled_from(
    ["{sid}", "{title} ", "{sid} {title}", "<{item_id}:{sid}>", "{{{title}}} ", "a{sid}b{sid}c", "{sid}{{sid}}"]
)
HISTORIES = st.lists(st.sampled_from([1, "1", "two", 3, "3", 4, 5, "5", 77, "zz", "01"]), max_size=12)


@given(
    history=HISTORIES,
    prefix=TEXTS,
    item=ITEMS,
    separator=TEXTS,
    suffix=TEXTS,
    max_items=st.none() | st.integers(1, 6),
    max_tokens=st.integers(0, 60),
)
def test_equals_the_naive_rendering(
    catalog: Catalog, history: list[int | str], max_items: int | None, max_tokens: int, **texts: str
) -> None:
    template = HistoryTemplate(**texts, max_items=max_items)
    expected = naive(template, history, max_tokens)
    if expected is None:
        with pytest.raises(InvalidRequest, match=f"prompt may have {max_tokens}") as caught:
            template.render(catalog, history, encode, max_tokens)
        assert (caught.value.code, caught.value.param) == ("prompt_too_long", "history")
    else:
        assert template.render(catalog, history, encode, max_tokens) == expected


def test_text_between_sids_is_encoded_in_one_piece(catalog: Catalog) -> None:
    seen = []

    def recording(text: str) -> list[int]:
        seen.append(text)
        return [len(text)]

    template = HistoryTemplate(prefix="<s>", item="[{title}={sid}]", separator=", ", suffix=" next", max_items=2)
    prompt = template.render(catalog, [4, "nope", "two", 3], recording, 100)
    assert seen == ["<s>[blue=", "], [a {braced} name=", "] next"]
    assert prompt == HistoryPrompt(
        token_ids=[9, 100, 20, 101, 110, 120, 6], num_used=2, num_dropped=1, unknown=["nope"], at_max_items=True
    )


def test_items_without_text_count_as_a_token_each(catalog: Catalog) -> None:
    prompt = HistoryTemplate(item="{title}").render(catalog, ["5"] * 9, encode, 4)
    assert (prompt.token_ids, prompt.num_used, prompt.num_dropped) == ([], 4, 5)


def test_empty_history_is_prefix_and_suffix(catalog: Catalog) -> None:
    prompt = HistoryTemplate(prefix="new", separator=" and ", suffix=" user").render(catalog, [], encode, 2)
    assert prompt == HistoryPrompt(token_ids=encode("new user"), num_used=0, num_dropped=0, unknown=[])


def test_equals_the_real_tokenizer_on_the_whole_text(checkpoint: Path, catalog_file: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    catalog = Catalog.load(catalog_file, token_id=tokenizer.token_id)
    assert catalog.template is not None
    history = [f"item-{number}" for number in (3, 59, 20, 21, 3)]
    sids = ["".join(map(str, catalog.sid(catalog.row_of(item) or 0))) for item in history]
    prompt = catalog.template.render(catalog, history, tokenizer.encode, 200)
    assert prompt.token_ids == tokenizer.encode("watched " + " ".join(sids) + " next")
    assert (prompt.num_used, len(prompt.token_ids)) == (5, 17)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"item": "{sid"}, "expected '}' before end of string"),
        ({"item": "sid}"}, "Single '}' encountered in format string"),
        ({"item": "{}"}, "a placeholder is a column's name in braces, with nothing else"),
        ({"item": "{title!r}{sid}"}, "a placeholder is a column's name in braces"),
        ({"item": "{title:>9}"}, "a placeholder is a column's name in braces"),
        ({"item": "text {{sid}}"}, "template.item must name {sid} or a column"),
        ({"max_items": 0}, "template.max_items: expected int >= 1"),
        ({"sep": ","}, "unknown field 'template.sep'"),
        ({"item": "{titel}"}, "template.item: no metadata column 'titel' (did you mean 'title'?); there are: title"),
    ],
)
def test_bad_templates_are_refused(tmp_path: Path, template: dict[str, Any], message: str) -> None:
    write_header(tmp_path, {"template": template})
    with pytest.raises(CatalogError) as caught:
        Catalog.load(write_jsonl(tmp_path / "items.jsonl", ROWS))
    assert str(caught.value).startswith("catalog.json: ")
    assert message in str(caught.value)


def test_a_template_survives_the_wire() -> None:
    template = HistoryTemplate(prefix="a", item="{sid}{x}", max_items=3)
    assert msgspec.json.decode(msgspec.json.encode(template), type=HistoryTemplate) == template
