"""Tokenizer and chat template, from the checkpoint alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from widebeam.errors import CheckpointError, InvalidRequest
from widebeam.model.config import read_json, read_utf8

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer_config.json")
_JSON_FILES = ("config.json", *TOKENIZER_FILES, "added_tokens.json", "special_tokens_map.json")
_TEXT_FILES = ("merges.txt", "chat_template.jinja")


class Tokenizer:
    """A thin face on Hugging Face's tokenizer. Methods are thread-safe for reading."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises many kinds, and mostly does not say of which file
            _name_the_broken(folder)
            raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from None
        self.has_chat_template = self._tokenizer.chat_template is not None
        self._check_chat_template(folder)
        eos = self._tokenizer.eos_token_id
        self.eos_token_ids: set[int] = set() if eos is None else {int(eos)}
        self.special_token_ids: list[int] = sorted(map(int, self._tokenizer.all_special_ids))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None if it has none: then only token ids are accepted. Raises CheckpointError."""
        there = [name for name in TOKENIZER_FILES if (folder / name).exists()]
        whole = "tokenizer.json" in there or ("vocab.json" in there and (folder / "merges.txt").exists())
        if there and not whole:
            raise CheckpointError(f"{folder} has {' and '.join(there)}, but no tokenizer.json")
        return cls(folder) if there else None

    def _check_chat_template(self, folder: Path) -> None:
        """Raise CheckpointError for a template that is none, which no chat would get past."""
        from jinja2 import TemplateSyntaxError

        try:
            if self.has_chat_template:
                self._tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template in {folder} is broken at line {error.lineno}: {error}") from None
        except Exception:  # it compiles, and may refuse what it likes
            return

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids as Hugging Face and SGLang make them. Added tokens spelt in the text become those tokens.

        `add_special_tokens`: with those that the tokenizer itself puts around a text. Qwen's put none.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it: bytes of a text stand there as other characters."""
        return self._tokenizer.convert_ids_to_tokens(ids)

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token, or None if the vocabulary lacks it."""
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None or (token_id == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token):
            return None
        return int(token_id)

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """The checkpoint's chat template over messages, ready for the assistant's turn, as token ids.

        `options` are variables of the template; `add_special_tokens` is that of `encode`.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "the model has no chat template: send input_ids, or a prompt where the route takes one",
                param="messages",
            )
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, **({"add_generation_prompt": True} | options)
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        return self.encode(text, add_special_tokens=add_special_tokens)


def _name_the_broken(folder: Path) -> None:
    """Raise CheckpointError with the file that keeps transformers from loading a tokenizer, if one alone does."""
    from tokenizers import Tokenizer as Fast

    for read, names in ((read_json, _JSON_FILES), (read_utf8, _TEXT_FILES)):
        for path in (folder / name for name in names):
            if path.exists():
                read(path)
    whole = folder / "tokenizer.json"
    try:
        if whole.exists():
            Fast.from_file(str(whole))
    except Exception as error:  # the library's own kind is Exception itself
        raise CheckpointError(f"{whole} holds no tokenizer: {error}") from None
