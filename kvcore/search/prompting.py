"""How a search's questions become prompts, settled before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.config import check_template_args
from kvcore.models.templates import check_template, has_template, reads_argument
from kvcore.search.failures import ProblemFailed, named
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt, default_unless, prompt_ids


@dataclass(frozen=True)
class Prompting:
    """What all models of a search are given besides the question.

    Attributes:
        system_prompt: None for none.
        template_args: keywords of every chat template.
        warnings: where a model is given something else than was asked for, or than the others.
    """

    system_prompt: str | None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        models: Mapping[str, Any],
        scorer: Any,
        system_prompt: str | None,
        template_args: Mapping[str, Any],
        *,
        uses_template: bool,
    ) -> Prompting:
        """Settles it for a search.

        Args:
            models: LoadedModels that write, by role.
            scorer: the LoadedModel that the scorer prompts with questions, or None.
            uses_template: some problem brings no prompt text of its own.
        Raises:
            ValueError: a chat template cannot be rendered, or not with a system message; a name in
                ``template_args`` that is not the user's to give.
        """
        check_template_args(template_args)
        tokenizers = {role: model.tokenizer for role, model in models.items()}
        system = default_unless(system_prompt, tokenizers.values())
        warnings = []
        readers = list(tokenizers.values())
        if scorer is not None:
            readers.append(scorer.tokenizer)
        for name in template_args:
            if not any(reads_argument(tokenizer, name) for tokenizer in readers):
                warnings.append(f"template_args: no chat template reads {name!r}")
        if not uses_template:
            return cls(system, dict(template_args), tuple(warnings))

        shown = {r: check_template(r, m, system, template_args) for r, m in models.items()}
        for role in shown:
            asked = system_prompt != DEFAULT_SYSTEM_PROMPT or len(set(shown.values())) > 1
            if not shown[role] and asked:
                warnings.append(
                    f"{role} {models[role].name!r}: its chat template leaves the system prompt out"
                )
        readers_by_role = dict(models)
        if scorer is not None and scorer.tokenizer not in tokenizers.values():
            readers_by_role["scorer"] = scorer
        plain = [r for r, model in readers_by_role.items() if not has_template(model.tokenizer)]
        names = " and ".join(f"{role} {readers_by_role[role].name!r}" for role in plain)
        if plain and (system or len(plain) < len(readers_by_role)):
            what = "the system prompt and the question" if system else "the question"
            warnings.append(f"no chat template: {names} given {what} as plain text")
        return cls(system, dict(template_args), tuple(warnings))

    def ids(self, role: str, tokenizer: Any, prompt: Prompt, limit: int) -> list[int]:
        """The prompt of one model: 1 to ``limit - 1`` tokens. Raises ProblemFailed."""
        text = prompt.question if prompt.text is None else prompt.text
        place = _lone_surrogate(text) if isinstance(text, str) else None
        if place is not None:
            raise ProblemFailed(
                "question: expected text that has a UTF-8 form, "
                f"got the lone surrogate {text[place]!r} at {place}"
            )
        with named(f"question: no prompt for the {role} model"):
            ids = prompt_ids(tokenizer, prompt, self.system_prompt, self.template_args)
        if not 0 < len(ids) < limit:
            raise ProblemFailed(
                f"question: expected 1 to {limit - 1} prompt tokens for the {role} model, "
                f"got {len(ids)}"
            )
        return ids


def _lone_surrogate(text: str) -> int | None:
    """Place of the first character without a UTF-8 form (half of a surrogate pair), or None."""
    return next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
