"""Texts to ids, such that text stays text and nothing is added to it.

A tokenizer takes the name of a special token for the token wherever it stands, and some put a space
in front of what they are given. Texts that people or other models wrote are encoded here by a copy
of the tokenizer in which special tokens go by names that do not occur in them: every rule of the
tokenizer applies, and no text can say a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_PRIVATE = range(0xE000, 0xF8FF)  # characters without a meaning; tokenizers leave them alone


def special_names(tokenizer: Any) -> dict[str, int]:
    """Special tokens by name, those included that only the configuration calls special."""
    names = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    for name in getattr(tokenizer, "all_special_tokens", ()):
        names.setdefault(str(name), tokenizer.convert_tokens_to_ids(str(name)))
    return {name: i for name, i in names.items() if name and i is not None}


def matched_names(tokenizer: Any) -> list[str]:
    """Names that the tokenizer takes for special tokens wherever they stand; longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return sorted(added.intersection(special_names(tokenizer)), key=len, reverse=True)


def names_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Finds any of ``names``, the longest first as tokenizers do."""
    longest = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")  # without any: never matches


def unused_character(*texts: str) -> str:
    """A private-use character that none of ``texts`` contains."""
    used = set().union(*texts)
    return next(chr(c) for c in _PRIVATE if chr(c) not in used)


@dataclass(frozen=True)
class Piece:
    """Part of a text to encode. ``plain``: names of special tokens in it are ordinary text."""

    text: str
    plain: bool


def encode_template(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` as it stands: names of special tokens are special tokens."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=False).input_ids)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` where it goes on after other ids: nothing is put in front of it.

    Names of special tokens in it are ordinary text. Added tokens that are not special stand for
    their own text, as everywhere. Raises ValueError if ``text`` is not Unicode.
    """
    _check_unicode(text)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and _puts_in_front(backend):
        return _encode_copy(tokenizer, [Piece(text, True)], goes_on=True)
    ids = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
    if backend is None or not _says_special(tokenizer, text, ids):
        return ids
    return _encode_copy(tokenizer, [Piece(text, True)], goes_on=True)


def encode_pieces(
    tokenizer: Any, pieces: Sequence[Piece], *, special_in_front: bool = False
) -> list[int]:
    """Ids of the text that ``pieces`` make together, as the tokenizer cuts it when given it whole.

    Args:
        special_in_front: with the special tokens that the tokenizer puts before a text.
    Raises:
        ValueError: the text is not Unicode.
    """
    whole = "".join(piece.text for piece in pieces)
    _check_unicode(whole)
    names = special_names(tokenizer)
    pattern = names_pattern(matched_names(tokenizer))
    meant, begin = [], 0
    for piece in pieces:
        if not piece.plain:
            meant += [(begin + m.start(), m.group()) for m in pattern.finditer(piece.text)]
        begin += len(piece.text)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _encode_cut(tokenizer, pieces, pattern, special_in_front)
    if meant == [(m.start(), m.group()) for m in pattern.finditer(whole)]:
        encoding = tokenizer(
            whole, add_special_tokens=special_in_front, split_special_tokens=False
        )[0]
        ids = _without_end(encoding)
        known = set(names.values()) - {getattr(tokenizer, "unk_token_id", None)}
        own = encoding.special_tokens_mask  # what the tokenizer has put in front
        found = [i for i, is_own in zip(ids, own, strict=False) if i in known and not is_own]
        if found == [names[name] for _, name in meant if names[name] in known]:
            return ids
    return _encode_copy(tokenizer, pieces, goes_on=False, special_in_front=special_in_front)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: expected Unicode, got the lone surrogate {text[error.start]!r} "
            f"at character {error.start}"
        ) from None


def _says_special(tokenizer: Any, text: str, ids: Sequence[int]) -> bool:
    """Whether a special token came of ``text``; the unknown token may, unless it is named."""
    names = special_names(tokenizer)
    unknown = getattr(tokenizer, "unk_token_id", None)
    found = set(names.values()).intersection(ids)
    return any(i != unknown or name in text for name, i in names.items() if i in found)


def _without_end(encoding: Any) -> list[int]:
    """Ids without the special tokens that the tokenizer puts after a text: it shall go on."""
    ids, mask = list(encoding.ids), list(encoding.special_tokens_mask)
    while ids and mask[len(ids) - 1]:
        ids.pop()
    return ids


def _encode_cut(
    tokenizer: Any, pieces: Sequence[Piece], pattern: re.Pattern[str], special_in_front: bool
) -> list[int]:
    """For tokenizers without a backend: what stands between special tokens is encoded alone."""
    ids: list[int] = []
    text = ""
    for part in _split(pieces, pattern):
        if part.plain:
            text += part.text
        else:
            ids += encode_text(tokenizer, text) + encode_template(tokenizer, part.text)
            text = ""
    if special_in_front and not ids:
        return list(tokenizer(text, split_special_tokens=True).input_ids)
    return ids + encode_text(tokenizer, text)


def _split(pieces: Sequence[Piece], pattern: re.Pattern[str]) -> Iterator[Piece]:
    """Pieces that are either plain or the name of one special token."""
    for piece in pieces:
        end = 0
        for match in () if piece.plain else pattern.finditer(piece.text):
            yield Piece(piece.text[end : match.start()], True)
            yield Piece(match.group(), False)
            end = match.end()
        yield Piece(piece.text[end:], True)


def _encode_copy(
    tokenizer: Any, pieces: Sequence[Piece], *, goes_on: bool, special_in_front: bool = False
) -> list[int]:
    names = special_names(tokenizer)
    mark = unused_character(*(piece.text for piece in pieces))
    copy = _renamed_copy(tokenizer, tuple(sorted(names.items())), mark, goes_on)
    text = "".join(
        part.text if part.plain else _new_name(names[part.text], mark)
        for part in _split(pieces, names_pattern(matched_names(tokenizer)))
    )
    return _without_end(copy.encode(text, add_special_tokens=special_in_front))


def _new_name(token: int, mark: str) -> str:
    return f"{mark}{token}{mark}"


@lru_cache(maxsize=16)
def _renamed_copy(
    tokenizer: Any, names: tuple[tuple[str, int], ...], mark: str, goes_on: bool
) -> Tokenizer:
    """The tokenizer with its special tokens renamed; ids are the same.

    Args:
        goes_on: puts nothing in front of a text.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    rename = {name: _new_name(i, mark) for name, i in names}
    for token in state["added_tokens"]:
        token["content"] = rename.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[rename.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in rename:
        model["unk_token"] = rename[model["unk_token"]]
    if model.get("merges"):  # none may lead to a special token, or start from one
        model["merges"] = [
            pair for pair in model["merges"] if rename.keys().isdisjoint((*pair, "".join(pair)))
        ]
    if goes_on:
        state["normalizer"] = _nothing_in_front(state["normalizer"])
        state["pre_tokenizer"] = _nothing_in_front(state["pre_tokenizer"])
    copy = Tokenizer.from_str(json.dumps(state))
    for name, i in names:
        if copy.token_to_id(rename[name]) != i:
            raise ValueError(f"tokenizer: special token {name!r} cannot be told from its name")
    return copy


def _puts_in_front(backend: Tokenizer) -> bool:
    """Whether the tokenizer puts a space before a text that has none."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        state = None if part is None else json.loads(part.__getstate__())
        if _nothing_in_front(state) != state:
            return True
    return False


def _nothing_in_front(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that leaves the beginning of a text alone.

    A space before every word, where spaces have already been cut away, is no addition: it stays.
    """
    if state is None:
        return None
    kind = state["type"]
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in state else "pretokenizers"
        first, *rest = state[key] or [None]
        if kind == "Sequence" and first is not None and first["type"] == "WhitespaceSplit":
            return state
        parts = [_nothing_in_front(part) for part in (first, *rest) if part is not None]
        return {**state, key: [part for part in parts if part is not None]}
    if kind == "Prepend":
        return None
    if kind == "Metaspace" and state.get("prepend_scheme", "always") != "never":
        return {**state, "prepend_scheme": "never"}
    if kind == "ByteLevel" and state.get("add_prefix_space"):
        return {**state, "add_prefix_space": False}
    return state
