"""What the fields of the wire format mean, for GET /openapi.json: their docstrings."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from widebeam.engine.request import Sampling, SearchParams
from widebeam.reference import field_docs


def describe_fields(components: dict[str, Any], kinds: list[Any]) -> None:
    """Put the docstrings of fields into the schemas of the structs among these types.

    A field of a body without one means what it means to the engine.
    """
    meanings = field_docs(Sampling) | field_docs(SearchParams)
    structs: dict[str, type[msgspec.Struct]] = {}
    for info in inspect.multi_type_info(kinds):
        _find_structs(info, structs)
    for name, struct in structs.items():
        docs = field_docs(struct)
        if struct.__struct_config__.forbid_unknown_fields:
            rest = {
                field: f"{meanings[field]} {text}"
                for field, text in docs.items()
                if text.startswith("None:") and field in meanings
            }
            docs = meanings | docs | rest
        for field, wire in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            if field in docs:
                components[name]["properties"][wire]["description"] = docs[field]


def _find_structs(kind: inspect.Type, found: dict[str, type[msgspec.Struct]]) -> None:
    """All structs in a type, by their names."""
    if isinstance(kind, inspect.StructType):
        if kind.cls.__name__ in found:
            return
        found[kind.cls.__name__] = kind.cls
        inner = [field.type for field in kind.fields]
    else:
        inner = [*getattr(kind, "types", ())]
        inner += [getattr(kind, name) for name in ("type", "item_type", "value_type") if hasattr(kind, name)]
    for one in inner:
        _find_structs(one, found)
