"""Questions to token ids, and ids from one vocabulary to another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.models.templates import has_template, head_ids
from kvcore.models.text_ids import Piece, encode_pieces, encode_template, encode_text
from kvcore.models.token_bytes import byte_token_ids

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


def default_unless(system_prompt: str | None, tokenizers: Iterable[Any]) -> str | None:
    """``system_prompt``; None if it is the default, and none of ``tokenizers`` has a template.

    The default speaks to chat models. Models that all go without a template get questions alone.
    """
    if system_prompt == DEFAULT_SYSTEM_PROMPT and not any(map(has_template, tokenizers)):
        return None
    return system_prompt


def prompt_ids(
    tokenizer: Any,
    prompt: Prompt,
    system_prompt: str | None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that a model continues from.

    Uses the tokenizer's chat template with ``system_prompt`` (no system message if None or empty),
    the generation prompt and ``template_args``. A tokenizer without a template gets system prompt
    and question as plain text, a blank line between them, after the special tokens that it puts in
    front of texts. Names of special tokens in question and system prompt are ordinary text.
    Raises:
        TemplateError: the template cannot be rendered.
        ValueError: a text is not Unicode.
    """
    if prompt.text is not None:
        return encode_template(tokenizer, prompt.text)
    return head_ids(tokenizer, prompt.question, system_prompt, template_args, answer=False)


def encode_around(tokenizer: Any, head: str, text: str, tail: str) -> list[int]:
    """Ids of ``head + text + tail``, where only head and tail may contain special tokens."""
    return encode_pieces(tokenizer, [Piece(head, False), Piece(text, True), Piece(tail, False)])


def same_tokenizer(first: Any, second: Any) -> bool:
    """True when every token has the same id in both, so that ids may be exchanged.

    FeedOutput matrices may have more rows than there are tokens; those are never sampled.
    """
    return first is second or first.get_vocab() == second.get_vocab()


@dataclass(frozen=True)
class Translator:
    """Carries steps from one model's vocabulary to another's.

    Attributes:
        same: ids mean the same in both; they pass untouched.
        tokenizer: of the receiving model.
        eos: id that ends a text for the receiving model.
        vocab: ids of the receiving model; None if all of the tokenizer's.
    """

    same: bool
    tokenizer: Any
    eos: int | None
    vocab: int | None = None

    def ids(self, tokens: Sequence[int], text: bytes, *, ends: bool) -> list[int]:
        """The step for the receiving model.

        Args:
            tokens: the step in the giving vocabulary.
            text: its bytes, special tokens excluded.
            ends: its last token is an eos; the receiver's own is then appended.
        Returns:
            ``tokens`` if ``same``; else the ids of the text as it goes on after other ids, with
            nothing added. Of a character that the step's beginning or end cuts, the bytes are
            given where the receiving vocabulary has ids for bytes; else it is left out. May be
            empty.
        """
        if self.same:
            return list(tokens)
        ids: list[int] = []
        for part in _decoded(text):
            if isinstance(part, str):
                ids += encode_text(self.tokenizer, part)
            else:
                ids += self._byte_ids(part)
        if ends and self.eos is not None:
            ids.append(self.eos)
        return ids

    def _byte_ids(self, data: bytes) -> list[int]:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return []
        known = byte_token_ids(self.tokenizer)
        ids = [known[byte] for byte in data if byte in known]
        return [i for i in ids if self.vocab is None or i < self.vocab]


def _decoded(data: bytes) -> list[str | bytes]:
    """``data`` as UTF-8: texts, and between them the bytes that are none."""
    parts: list[str | bytes] = []
    while data:
        try:
            parts.append(data.decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            if error.start:
                parts.append(data[: error.start].decode("utf-8"))
            parts.append(data[error.start : error.end])
            data = data[error.end :]
    return parts


def translator(source: Any, target: Any) -> Translator:
    """From the LoadedModel ``source`` to the LoadedModel ``target``."""
    eos = getattr(target.tokenizer, "eos_token_id", None)
    if eos is None and target.eos_ids:
        eos = min(target.eos_ids)
    same = source is target or same_tokenizer(source.tokenizer, target.tokenizer)
    return Translator(same=same, tokenizer=target.tokenizer, eos=eos, vocab=target.vocab)
