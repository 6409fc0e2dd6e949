"""What msgspec finds wrong with a value, in words for whoever sent it: where, what, and what would be right."""

from __future__ import annotations

import codecs
import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_NO_CHOICE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)")
_MEANT = {
    **dict.fromkeys(("k", "top_k", "limit", "size", "count"), ("n", "beam_width")),
    **dict.fromkeys(("items", "item_ids"), ("history", "upsert")),
    "prompt": ("text",),
    "max_tokens": ("max_new_tokens",),
    **dict.fromkeys(("beams", "num_beams", "width", "beam_size"), ("beam_width",)),
}
"""What fields are called elsewhere, and here."""
REQUEST_ID, REQUEST_IDS = r"\A[!-~]{1,128}\Z", r"\A[!-~]{0,128}\Z"
PATTERNS = {REQUEST_ID: "1 to 128 visible ASCII characters", REQUEST_IDS: "up to 128 visible ASCII characters"}
"""What texts may have to match, in words."""


class Fault(NamedTuple):
    """One thing that is wrong with a value."""

    place: str
    """As `filters.where[0].op`; empty: the whole value."""
    words: str
    """What is wrong there; to be put behind the place and a colon."""
    unknown: str = ""
    """The field that there is not; `place` then ends with it."""

    def under(self, name: str) -> Fault:
        """The same of a larger value that has this one under a name."""
        return self._replace(place=f"{name}.{self.place}" if self.place else name)

    @property
    def text(self) -> str:
        """The whole sentence."""
        if self.unknown:
            return f"unknown field {self.place!r}{self.words}"
        return f"{self.place}: {self.words}" if self.place else self.words


def find_fault(error: msgspec.ValidationError, kind: Any) -> Fault:
    """Read msgspec's error about a value that is no `kind`."""
    message = str(error)
    path = _PATH.search(message)
    place, key = (path[2], bool(path[1])) if path else ("", False)
    said = message[: path.start()] if path else message
    if unknown := _UNKNOWN.match(said):
        name = unknown[1]
        known = _fields(kind, place)
        inside = [f"{field}.{one}" for field in known for one in _fields(kind, f"{place}.{field}".strip("."))]
        return Fault(f"{place}.{name}".strip("."), did_you_mean(name, known, inside), name)
    if missing := _MISSING.match(said):
        return Fault(f"{place}.{missing[1]}".strip("."), "it must be given")
    if (wrong := _NO_CHOICE.match(said)) and (choices := _choices(kind, place)):
        return Fault(place, f"{wrong[1]} is none of: {', '.join(choices)}")
    for pattern, meaning in PATTERNS.items():
        said = said.replace(f"matching regex {pattern!r}", f"of {meaning}")
    words = "e" + said[1:].replace("`", "") if said.startswith("Expected ") else said
    return Fault(place, f"a key: {words}" if key else words)


def why_no_json(error: Exception, text: bytes) -> str:
    """Why a text that was to be JSON is not."""
    if not text.strip():
        return "it is empty"
    if text.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark: save it as UTF-8 without one"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ").replace("Input data was truncated", "it ends too early")


def counted(number: int, noun: str, spec: str = "") -> str:
    """`1 item`, `2 items`; the number in the form of `spec`."""
    return f"{number:{spec}} {noun}{'' if number == 1 else 's'}"


def did_you_mean(name: str, known: list[str], inside: Iterable[str] = ()) -> str:
    """A question to put behind a sentence: known names that this may stand for. Empty if there are none."""
    return question(names_meant(name, known, inside))


def question(names: Iterable[str]) -> str:
    """Whether one of these was meant, to put behind a sentence; empty if there are none."""
    told = " or ".join(map(repr, names))
    return f"; did you mean {told}?" if told else ""


def names_meant(name: str, known: list[str], inside: Iterable[str] = ()) -> list[str]:
    """Known names that this may stand for, as what others call them, as one of those `inside` (`policy.cap`), as the
    beginning of theirs, or misspelt."""
    names = (name, *_MEANT.get(name, ()))
    meant = [one for one in names if one in known]
    meant = meant or [one for one in inside if one.rpartition(".")[2] in names][:1]
    meant = meant or [one for one in known if one.startswith(f"{name}_")][:2]
    return meant or difflib.get_close_matches(name, known, n=1)


def value_at(tree: Any, place: str) -> Any:
    """What lies at a place; None if nothing does."""
    for index, name in _STEP.findall(place):
        try:
            tree = tree[name or int(index)]
        except (LookupError, TypeError, ValueError):
            return None
    return tree


def _fields(kind: Any, place: str) -> list[str]:
    structs = (one for one in _types(kind, place) if isinstance(one, inspect.StructType))
    return [field.encode_name for struct in structs for field in struct.fields]


def _choices(kind: Any, place: str) -> list[str]:
    """All values that a field of a few can have."""
    choices = (one for one in _types(kind, place) if isinstance(one, inspect.LiteralType))
    return [str(value) for one in choices for value in one.values]


@functools.lru_cache(maxsize=64)
def _types(kind: Any, place: str) -> list[inspect.Type]:
    """The types that a value at this place of a `kind` may have, members of unions each by itself."""
    found = [*_members(_type_info(kind))]
    for index, name in _STEP.findall(place):
        found = [member for one in found for inner in _inner(one, index, name) for member in _members(inner)]
    return found


_type_info = functools.lru_cache(maxsize=64)(inspect.type_info)


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _members(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _members(member)
    else:
        yield kind


def _inner(kind: inspect.Type, index: str, name: str) -> Iterator[inspect.Type]:
    """What a value of this type has under an index or a name."""
    if isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif index and isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield kind.item_type
    elif isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == name)
        if name and name == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
