"""Questions to token ids, and ids from one vocabulary to another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Source: KV-Rescue follows the Qwen2.5-Math regime; its model cards give this message.
DEFAULT_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """One problem.

    Attributes:
        question: what the scorer is shown, and the user message of the chat template.
        text: exact prompt text to use instead of any template; special tokens in it count as such.
        key: names the problem in results and keys its random numbers; None takes its place in the
            list. Give keys when a list is split over runs: results then do not depend on the split.
    """

    question: str
    text: str | None = None
    key: int | None = None


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` alone; names of special tokens in it are ordinary text."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return list(ids)


def encode_template(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered ``text``, in which names of special tokens are special tokens."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=False).input_ids)


def render_chat(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, generation_prompt: bool
) -> str:
    """The chat template's text for ``messages``."""
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=generation_prompt
    )
    return str(text)


def prompt_ids(tokenizer: Any, prompt: Prompt, system_prompt: str | None) -> list[int]:
    """Token ids that a model continues from.

    Uses the tokenizer's chat template with ``system_prompt`` (no system message if None or empty)
    and the generation prompt. A tokenizer without a template gets the question as it is, with the
    special tokens that the tokenizer adds, and ``system_prompt`` is not used.
    """
    if prompt.text is not None:
        return encode_template(tokenizer, prompt.text)
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt.question).input_ids)
    messages = [{"role": "user", "content": prompt.question}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return encode_template(tokenizer, render_chat(tokenizer, messages, generation_prompt=True))


def encode_around(tokenizer: Any, head: str, text: str, tail: str) -> list[int]:
    """Ids of ``head + text + tail``, where only head and tail may contain special tokens.

    Special tokens cut a text for the tokenizer, so the ids equal those of the whole text when
    ``text`` names none: everything between the last special token of ``head`` and the first of
    ``tail`` is encoded in one piece.
    """
    added = tokenizer.added_tokens_decoder.values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    pattern = "|".join(map(re.escape, names)) or r"(?!)"  # without any: what never matches
    cut = max((found.end() for found in re.finditer(pattern, head)), default=0)
    first = re.search(pattern, tail)
    end = first.start() if first else len(tail)
    return (
        encode_template(tokenizer, head[:cut])
        + encode_text(tokenizer, head[cut:] + text + tail[:end])
        + encode_template(tokenizer, tail[end:])
    )


def same_tokenizer(first: Any, second: Any) -> bool:
    """True when every token has the same id in both, so that ids may be exchanged.

    Output matrices may have more rows than there are tokens; those are never sampled.
    """
    return first is second or first.get_vocab() == second.get_vocab()


@dataclass(frozen=True)
class Translator:
    """Carries steps from one model's vocabulary to another's.

    Attributes:
        same: ids mean the same in both; they pass untouched.
        tokenizer: of the receiving model.
        eos: id that ends a text for the receiving model.
    """

    same: bool
    tokenizer: Any
    eos: int | None

    def ids(self, tokens: Sequence[int], text: bytes, *, ends: bool) -> list[int]:
        """The step for the receiving model.

        Args:
            tokens: the step in the giving vocabulary.
            text: its bytes, special tokens excluded.
            ends: its last token is an eos; the receiver's own is then appended.
        Returns:
            ``tokens`` if ``same``; else the ids of the text, encoded alone, without a character
            that the step's end cuts. May be empty.
        """
        if self.same:
            return list(tokens)
        ids = encode_text(self.tokenizer, text.decode("utf-8", errors="ignore"))
        if ends and self.eos is not None:
            ids.append(self.eos)
        return ids


def translator(source: Any, target: Any) -> Translator:
    """From the LoadedModel ``source`` to the LoadedModel ``target``."""
    eos = getattr(target.tokenizer, "eos_token_id", None)
    if eos is None and target.eos_ids:
        eos = min(target.eos_ids)
    same = source is target or same_tokenizer(source.tokenizer, target.tokenizer)
    return Translator(same=same, tokenizer=target.tokenizer, eos=eos)
