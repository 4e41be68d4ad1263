"""Chat templates: what people wrote stays text in them, whatever it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcore.models.text_ids import (
    Piece,
    encode_pieces,
    matched_names,
    names_pattern,
    unused_character,
)


class TemplateError(ValueError):
    """A chat template that cannot be rendered; the message is the reason."""


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def reads_argument(tokenizer: Any, name: str) -> bool:
    """Whether the tokenizer's chat template mentions a variable."""
    template = getattr(tokenizer, "chat_template", None) or ""
    texts = template.values() if isinstance(template, Mapping) else [template]
    return any(re.search(rf"\b{re.escape(name)}\b", str(text)) for text in texts)


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    *,
    generation_prompt: bool,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """The chat template's text for ``messages``. Raises TemplateError."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **(template_args or {}),
        )
    except Exception as error:  # a template is a program of somebody else's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        line = getattr(error, "lineno", None)
        raise TemplateError(reason if line is None else f"{reason} (line {line})") from error
    return str(text)


def messages_of(question: str, system_prompt: str | None) -> list[dict[str, str]]:
    """A conversation that begins with ``question``; no system message if there is no such text."""
    messages = [{"role": "user", "content": question}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def plain_text(question: str, system_prompt: str | None) -> str:
    """What models without a chat template are given."""
    return f"{system_prompt}\n\n{question}" if system_prompt else question


def head_ids(
    tokenizer: Any,
    question: str,
    system_prompt: str | None,
    template_args: Mapping[str, Any] | None,
    *,
    answer: bool,
) -> list[int]:
    """Ids of all that stands before an answer.

    Args:
        answer: the answer goes into an assistant's message of the template, for models that read
            one; else after the template's generation prompt.
    """
    if not has_template(tokenizer):
        plain = Piece(plain_text(question, system_prompt), True)
        return encode_pieces(tokenizer, [plain], special_in_front=True)
    contents = _Hidden(tokenizer, [question, system_prompt or ""])
    messages = messages_of(contents.hide(question), contents.hide(system_prompt or ""))
    if answer:
        messages.append({"role": "assistant", "content": contents.end})
    text = render_chat(
        tokenizer, messages, generation_prompt=not answer, template_args=template_args
    )
    if answer and contents.end not in text:
        raise TemplateError("it leaves out the assistant's message")
    return encode_pieces(tokenizer, contents.pieces(text.partition(contents.end)[0]))


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation and the template's generation prompt; what the messages say is text.

    Raises:
        ValueError: a message is not a role and a text, or there is no template.
        TemplateError: the template cannot be rendered.
    """
    if not has_template(tokenizer):
        raise ValueError("expected text or token ids: the tokenizer has no chat template")
    names = names_pattern(matched_names(tokenizer))
    for place, message in enumerate(messages):
        ok = message.keys() == {"role", "content"}
        if not ok or not all(isinstance(value, str) for value in message.values()):
            raise ValueError(
                f"message {place}: expected a text as 'role' and one as 'content', got {message!r}"
            )
        if not message["role"] or names.search(message["role"]):
            raise ValueError(f"message {place}: expected the name of a role, got {message!r}")
    contents = _Hidden(tokenizer, [message["content"] for message in messages])
    shown = [{"role": m["role"], "content": contents.hide(m["content"])} for m in messages]
    text = render_chat(tokenizer, shown, generation_prompt=True, template_args=template_args)
    return encode_pieces(tokenizer, contents.pieces(text))


class _Hidden:
    """Stand-ins for what must stay text while a template is rendered.

    What names a special token, or could become part of such a name with the template's own text, is
    replaced by a mark that templates leave alone; everything else they see as it is.
    """

    def __init__(self, tokenizer: Any, contents: Sequence[str]) -> None:
        self._names = matched_names(tokenizer)
        self._mark = unused_character(*contents, str(getattr(tokenizer, "chat_template", "")))
        self._texts: list[str] = []
        self.end = f"{self._mark}end{self._mark}"

    def hide(self, content: str) -> str:
        content = names_pattern(self._names).sub(lambda m: self._stand_in(m.group()), content)
        core = content.strip()
        begin = content.find(core)
        end = begin + len(core)
        tail = self._overlap(core, lambda name, n: core.endswith(name[:n]))
        head = self._overlap(core[: len(core) - tail], lambda name, n: core.startswith(name[-n:]))
        if tail:
            content = content[: end - tail] + self._stand_in(core[-tail:]) + content[end:]
        if head:
            stand_in = self._stand_in(core[:head])
            content = content[:begin] + stand_in + content[begin + head :]
        return content

    def pieces(self, text: str) -> list[Piece]:
        """The rendered ``text`` with what was hidden put back."""
        parts = re.split(f"{self._mark}(\\d+){self._mark}", text)
        if any(self._mark in part for part in parts):
            raise TemplateError("it takes texts apart that name special tokens")
        return [
            Piece(self._texts[int(part)], True) if i % 2 else Piece(part, False)
            for i, part in enumerate(parts)
        ]

    def _stand_in(self, text: str) -> str:
        self._texts.append(text)
        return f"{self._mark}{len(self._texts) - 1}{self._mark}"

    def _overlap(self, core: str, fits: Callable[[str, int], bool]) -> int:
        """Length of the longest part of a name, but not all, that ``fits`` finds in ``core``."""
        longest = 0
        for name in self._names:
            for n in range(min(len(name) - 1, len(core)), longest, -1):
                if fits(name, n):
                    longest = n
                    break
        return longest


def check_template(
    role: str,
    model: Any,
    system_prompt: str | None,
    template_args: Mapping[str, Any],
    *,
    answer: bool = False,
    remedy: str = '--system-prompt "", None in Python',
) -> bool:
    """Tries a model's chat template before anything runs.

    Args:
        role: what the model does in the search; its argument's name.
        answer: as of ``head_ids``.
        remedy: how a user goes without a system prompt.
    Returns:
        Whether the model is shown the system prompt (True if there is none).
    Raises:
        ValueError: the template cannot be rendered, or not with a system message.
    """
    if not has_template(model.tokenizer):
        return True

    def render(system: str | None) -> str:
        messages = messages_of("1 + 1?", system)
        if answer:
            messages.append({"role": "assistant", "content": "2"})
        return render_chat(
            model.tokenizer, messages, generation_prompt=not answer, template_args=template_args
        )

    try:
        text = render(system_prompt)
    except TemplateError as error:
        try:
            render(None)
        except TemplateError:
            raise ValueError(
                f"{role}: the chat template of {model.name!r} cannot be used, whatever "
                f"system_prompt (--system-prompt) says: {error}"
            ) from error
        raise ValueError(
            f"system_prompt: the chat template of the {role} model {model.name!r} takes no system "
            f"message ({error}): expected none ({remedy})"
        ) from error
    return not system_prompt or system_prompt.strip() in text
