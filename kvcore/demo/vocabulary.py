"""The demo's tokenizer: one token per digit, name, letter or sign."""

from __future__ import annotations

import re
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvcore.demo.task import LETTERS, NAMES, STEP_END

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SEPARATOR = "<extra_0>"  # closes a step in the conversation of the process reward model
_SIGNS = (" * ", " + ", " - ", " = ", "; ", "? ", ", ", ".", " ", " answer", STEP_END)
_PIECE = r" [*+\-=] | answer|; |\? |, |: |[a-z]+=|\n\n|."
# A problem is a user message and its solution the assistant's; there are no system messages.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def pieces() -> list[str]:
    """Every token's text by id, special tokens first."""
    return [
        PAD,
        EOS,
        UNKNOWN,
        SEPARATOR,
        *"0123456789",
        *_SIGNS,
        *LETTERS,
        *(f"{name}=" for name in NAMES),
        ": ",
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, its text pieces concatenating back to the text exactly."""
    vocab = {piece: i for i, piece in enumerate(pieces())}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[SEPARATOR],
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@cache
def _ids() -> dict[str, int]:
    return {piece: i for i, piece in enumerate(pieces())}


def token_id(piece: str) -> int:
    """Id of one token. Raises KeyError if ``piece`` is none."""
    return _ids()[piece]


def encode(text: str) -> list[int]:
    """Ids of a text of the task, as the tokenizer gives them, only faster.

    Raises:
        KeyError: a part of the text is no token.
    """
    return [_ids()[piece] for piece in re.findall(_PIECE, text, re.DOTALL)]
