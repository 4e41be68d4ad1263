"""What a user may give as prompts, as token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from kvcore.config import check_template_args, require
from kvcore.models.loader import LoadedModel
from kvcore.models.templates import chat_ids
from kvcore.models.text_ids import Piece, encode_pieces

_KINDS = "text, token ids or chat messages"


def prompt_ids(
    model: LoadedModel,
    prompts: Any,
    context_len: int,
    template_args: Mapping[str, Any] | None,
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
        prompts: one prompt or a list of them, all of one kind: text (str), token ids (ints, or an
            integer array or tensor of one dimension), or a conversation (dicts with "role" and
            "content").
        context_len: a prompt must be shorter.
        template_args: keywords of the chat template.
    Raises:
        ValueError: naming the place in ``prompts``, what was expected and what came.
    """
    ok = template_args is None or isinstance(template_args, Mapping)
    require(ok, "template_args", "a mapping of names to values", template_args)
    check_template_args(template_args or {})
    kind, single, items = _sorted_out(prompts)
    if template_args and kind != "chat messages":
        raise ValueError(f"template_args: expected with chat messages only, got {kind} as prompts")
    out = []
    for place, item in enumerate(items):
        where = "prompts" if single else f"prompts[{place}]"
        ids = _ids(model, kind, item, where, template_args)
        if not ids:
            raise ValueError(f"{where}: expected at least one token, got none from {item!r}")
        rows = model.config.vocab_size
        wrong = [token for token in ids if not 0 <= token < rows]
        if wrong:
            raise ValueError(f"{where}: expected token ids in [0, {rows}), got {wrong[0]}")
        if len(ids) >= context_len:
            raise ValueError(
                f"{where}: expected fewer tokens than the context of {context_len}, got {len(ids)}"
            )
        out.append(ids)
    return out


def _sorted_out(prompts: Any) -> tuple[str, bool, list[Any]]:
    """The kind of all prompts, whether ``prompts`` is a single one, and the prompts."""
    prompts = _plain(prompts)
    kind = _kind(prompts)
    if kind is not None:
        return kind, True, [prompts]
    if not isinstance(prompts, list):
        raise ValueError(f"prompts: expected {_KINDS}, or a list of such, got {prompts!r}")
    if not prompts:
        raise ValueError("prompts: expected at least one prompt, got none")
    items = [_plain(item) for item in prompts]
    kinds = [_kind(item) for item in items]
    for place, (item, found) in enumerate(zip(items, kinds, strict=True)):
        if found is None:
            raise ValueError(f"prompts[{place}]: expected {_KINDS}, got {_shown(item)}")
        if found != kinds[0]:
            raise ValueError(
                f"prompts: expected one kind in a call, got {kinds[0]} at prompts[0] and {found} "
                f"at prompts[{place}]"
            )
    assert kinds[0] is not None
    return kinds[0], False, items


def _plain(value: Any) -> Any:
    """Arrays, tensors and tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list)):
        return list(value)
    return value


def _kind(value: Any) -> str | None:
    """The kind of prompt that ``value`` is alone; None if it is none."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    if all(_is_id(item) for item in value):
        return "token ids"
    if all(isinstance(item, Mapping) for item in value):
        return "chat messages"
    return None


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, list) and value:
        names = sorted({type(item).__name__ for item in value})
        return f"a list of {' and '.join(names)}"
    return repr(value)


def _ids(
    model: LoadedModel,
    kind: str,
    item: Any,
    where: str,
    template_args: Mapping[str, Any] | None,
) -> list[int]:
    if kind == "token ids":
        return [operator.index(token) for token in item]
    if model.tokenizer is None:
        raise ValueError(
            f"{where}: expected token ids, got {kind}: model {model.name!r} has no tokenizer"
        )
    try:
        if kind == "chat messages":
            return chat_ids(model.tokenizer, item, template_args)
        if not item:
            raise ValueError("expected some text, got ''")
        return encode_pieces(model.tokenizer, [Piece(item, True)], special_in_front=True)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
