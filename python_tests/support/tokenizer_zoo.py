"""Small tokenizers of the kinds that checkpoints come with."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.tiny_models import CHAT_TEMPLATE, byte_tokenizer

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<extra_0>")


def sentence_piece(
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    *,
    template: str | None = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Pieces with U+2581 for a space, and 256 byte tokens; special tokens are in the vocabulary."""
    letters = [chr(c) for c in range(33, 127)]
    merges = [("▁", "x"), ("▁", "="), ("1", "2"), ("▁", "3"), ("3", "4")]
    pieces = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    pieces += [left + right for left, right in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(p, special=True) for p in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )


def llama_legacy(**options: object) -> PreTrainedTokenizerFast:
    """A space before every stretch of text between special tokens."""
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return sentence_piece(normalizers.Sequence(parts), **options)


def metaspace_first(**options: object) -> PreTrainedTokenizerFast:
    """A space before the text."""
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentence_piece(None, space, **options)


def metaspace_always(**options: object) -> PreTrainedTokenizerFast:
    space = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return sentence_piece(None, space, **options)


def no_prefix(**options: object) -> PreTrainedTokenizerFast:
    return sentence_piece(normalizers.Replace(" ", "▁"), **options)


def _byte_level(template: str | None, **options: object) -> PreTrainedTokenizerFast:
    fast = byte_tokenizer()
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=True, **options)
    fast.chat_template = template
    return fast


def byte_level(*, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    return _byte_level(template, add_prefix_space=False)


def byte_level_prefix(*, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    return _byte_level(template, add_prefix_space=True)


def half_special(*, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Its end of text is an added token that the file does not call special."""
    fast = byte_level(template=template)
    fast.add_tokens([AddedToken("<end>", special=False), AddedToken("<think>", special=False)])
    fast.eos_token = "<end>"
    return fast


def unigram(*, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Names of special tokens are pieces that the model itself would choose."""
    letters = [chr(c) for c in range(33, 127)]
    vocab = [(name, 0.0) for name in SPECIALS]
    vocab += [(f"<0x{b:02X}>", -20.0) for b in range(256)] + [(c, -9.0) for c in ("▁", *letters)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(p, special=True) for p in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def stripping(*, template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A special token that takes the white space around it."""
    fast = byte_level(template=template)
    fast.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|im_end|>", rstrip=True, special=True)]}
    )
    return fast


ZOO: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "byte level": byte_level,
    "byte level, prefix": byte_level_prefix,
    "half special": half_special,
    "stripping": stripping,
    "no prefix": no_prefix,
    "llama legacy": llama_legacy,
    "metaspace first": metaspace_first,
    "metaspace always": metaspace_always,
    "unigram": unigram,
}
