"""Stop strings against their plain definition: decode after every token, and look."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from widebeam.http.stop_strings import UNFINISHED, Decode, Stop, find_stop, settled, text_ends
from widebeam.model.tokenizer import Tokenizer

PIECES = ["aé", " 你", "你好", "😀", "ab", "b ", "c"]  # merged tokens, beside one for each byte


def save_byte_tokenizer(folder: Path) -> None:
    """Qwen's kind: a token for each byte, whose id is the byte; some for several; two special ones."""
    letters = letters_of_bytes()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    for piece in PIECES:
        vocabulary["".join(letters[byte] for byte in piece.encode())] = len(vocabulary)
    tokenizer = Bpe(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: printable ones for themselves."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder)
    return {"words": Tokenizer(checkpoint), "bytes": Tokenizer(folder)}


def by_definition(decode: Decode, ids: list[int], strings: list[str]) -> Stop | None:
    """Tokens come one by one; bytes that are no character yet do not count, unless nothing follows."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if count < len(ids):
            text = text.rstrip(UNFINISHED)
        found = [(text.index(string), place, string) for place, string in enumerate(strings) if string in text]
        if found:
            start, _, string = min(found)
            return Stop(count, start, start + len(string), string)
    return None


@pytest.mark.parametrize("kind", ["words", "bytes"])
@settings(max_examples=300)
@given(data=st.data())
def test_found_as_defined(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    size = len(tokenizer)
    favourites = range(7, 20) if kind == "words" else range(256, size)  # words; merged and special tokens
    ids = data.draw(st.lists(st.one_of(st.sampled_from(favourites), st.integers(0, size - 1)), max_size=24))
    skip = data.draw(st.booleans())

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=skip)

    text = decode(ids)
    parts = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda at: text[at[0] : sum(at)])
    string = st.one_of(parts, st.sampled_from(["a", "b c", "é", "你好", "<", " "])).filter(bool)
    strings = data.draw(st.lists(string, min_size=1, max_size=4))
    assert find_stop(decode, ids, text, strings) == by_definition(decode, ids, strings)
    ends = text_ends(decode, ids)
    assert ends == [len(decode(ids[: i + 1]).rstrip(UNFINISHED)) for i in range(len(ids) - 1)] + [len(text)] * bool(ids)


@pytest.mark.parametrize("kind", ["words", "bytes"])
@settings(max_examples=200)
@given(data=st.data())
def test_what_is_settled_stays(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """Of a text that grows token by token: it is never taken back, and a stop string is found where it is complete."""
    tokenizer = tokenizers[kind]
    size, decode = len(tokenizer), tokenizer.decode
    favourites = range(7, 20) if kind == "words" else range(256, size)
    ids = data.draw(st.lists(st.one_of(st.sampled_from(favourites), st.integers(0, size - 1)), min_size=1, max_size=20))
    text = decode(ids)
    parts = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda at: text[at[0] : sum(at)])
    strings = data.draw(st.lists(parts.filter(bool), max_size=3))
    stop = by_definition(decode, ids, strings)
    end = text if stop is None else text[: stop.start]
    before = ""
    for count in range(1, len(ids)):
        so_far = decode(ids[:count])
        found = find_stop(decode, ids[:count], so_far.rstrip(UNFINISHED), strings)
        if found is not None:
            assert found == stop
            return
        stays = settled(so_far, strings)
        assert stays.startswith(before) and end.startswith(stays)
        assert len(stays) >= len(so_far.rstrip(UNFINISHED)) - max(map(len, strings), default=1) + 1
        before = stays
    assert stop is None or stop.num_tokens == len(ids)


def test_a_string_over_tokens_and_inside_a_character(tokenizers: dict[str, Tokenizer]) -> None:
    decode = tokenizers["bytes"].decode
    ids = tokenizers["bytes"].encode("x 你好y")
    assert len(ids) == 9  # a token for each byte
    assert decode(ids[:4]) == "x " + UNFINISHED
    assert find_stop(decode, ids, decode(ids), ["你"]) == Stop(5, 2, 3, "你")
    assert find_stop(decode, ids, decode(ids), [" 你好"]) == Stop(8, 1, 4, " 你好")


def test_which_of_several_strings(tokenizers: dict[str, Tokenizer]) -> None:
    decode = tokenizers["words"].decode
    ids = tokenizers["words"].encode("watched next a b")
    text = decode(ids)
    # the first to be complete, though another begins before it
    assert find_stop(decode, ids, text, ["next a b", "a"]) == Stop(1, 1, 2, "a")
    assert find_stop(decode, ids, text, ["d next a", "next"]) == Stop(2, 8, 12, "next")
    # complete at the same token: the one that begins first, then the one named first
    assert find_stop(decode, ids, text, ["ext", "xt", "d n"]) == Stop(2, 6, 9, "d n")
    assert find_stop(decode, ids, text, ["ne", "nex"]) == Stop(2, 8, 10, "ne")
    assert find_stop(decode, ids, text, ["c"]) is not None
    assert find_stop(decode, ids, text, ["z"]) is None
    assert find_stop(decode, [], "", ["z"]) is None
