"""The bytes of a text's ids, one after the other, are the text in UTF-8, whatever the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.tiny_models import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvcore.models.token_bytes import token_byte_list

ROOT = Path(__file__).resolve().parents[1]
MODELS = Path(os.environ.get("KVCORE_TEST_MODELS", ROOT.parent / "models"))
TEXTS = [
    "plain words, and 3.14 numbers",
    "a\n\nb\r\n\tc  d   e",
    "naïve café Ångström",
    "汉字与假名 かな カナ 한국어",
    "Привет, мир! नमस्ते שלום مرحبا",
    "👍 👍🏽 🧑‍🚀 🇩🇪 x\u0301",
    "∑_{i=1}^{n} x² ≤ ∞ \\boxed{½}",
    "\u00a0\u2028\u200b\ufeff\x00\x7f",
    "<|im_end|> in words, <0x41> too, and [PAD]",
    "end of line.\n\n(so)\n\n\n\n",
]


def joined(tokenizer: PreTrainedTokenizerFast, text: str) -> bytes:
    """Bytes of the ids of ``text``; names of special tokens in it are ordinary text."""
    pieces = token_byte_list(tokenizer)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return b"".join(pieces[i] for i in ids)


def byte_fallback_tokenizer(decoder: decoders.Decoder, **parts: object) -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE: pieces with U+2581 for a space, and 256 byte tokens."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("e", "n"), ("\u2581", "\u2581")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581", *letters, *(left + right for left, right in merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def llama_like() -> PreTrainedTokenizerFast:
    """As Llama 2: a normalizer marks spaces; the decoder is a sequence without Metaspace."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return byte_fallback_tokenizer(
        decoders.Sequence(steps), normalizer=normalizers.Replace(" ", "\u2581")
    )


def metaspace_like() -> PreTrainedTokenizerFast:
    """As SentencePiece exports: Metaspace on both sides."""
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    space = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return byte_fallback_tokenizer(decoders.Sequence(steps), pre_tokenizer=space)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_tokenizer, llama_like, metaspace_like])
def test_bytes_of_a_texts_ids_are_the_text(make, text):
    assert joined(make(), text) == text.encode()


@pytest.mark.parametrize("make", [byte_tokenizer, llama_like, metaspace_like])
def test_every_single_byte_has_a_token(make):
    pieces = token_byte_list(make())
    assert {bytes([b]) for b in range(256)} <= set(pieces)


@pytest.mark.parametrize("make", [byte_tokenizer, llama_like, metaspace_like])
def test_special_tokens_stand_for_no_bytes_and_others_for_some(make):
    tokenizer = make()
    pieces = token_byte_list(tokenizer)
    assert len(pieces) == len(tokenizer)
    special = set(tokenizer.added_tokens_decoder)
    assert special and {i for i, piece in enumerate(pieces) if not piece} == special


def test_merged_pieces_keep_all_their_bytes():
    tokenizer = byte_tokenizer()
    pieces = token_byte_list(tokenizer)
    assert {b"\n\n", b".\n\n", b")\n\n"} <= set(pieces)
    spaces = token_byte_list(llama_like())
    assert {b" th", b"en", b"  "} <= set(spaces)


def test_added_tokens_that_are_not_special_are_text():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    pieces = token_byte_list(tokenizer)
    assert pieces[-2:] == [b"<think>", "日本".encode()]
    assert joined(tokenizer, "<think>日本 a") == "<think>日本 a".encode()


def test_pieces_outside_the_byte_alphabet_stand_for_themselves():
    vocab = {"a": 0, "b": 1, "\u2581日": 2, "ab c": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_byte_list(fast) == [b"a", b"b", "\u2581日".encode(), b"ab c"]


def test_ids_without_a_token_stand_for_no_bytes():
    vocab = {"a": 0, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    pieces = token_byte_list(fast)
    assert pieces[:4] == [b"a", b"", b"", b"b"]
    assert len(pieces) > fast.eos_token_id


def test_ids_that_fill_up_the_vocabulary_are_left_out():
    vocab = {"a": 0, "b": 1, "[PAD2]": 2, "[PAD3]": 3, "[PAD9]": 4, "[PAD5]": 5, "[PAD6]": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_byte_list(fast) == [b"a", b"b", b"", b"", b"[PAD9]"]


def test_word_level_tokens_are_their_words():
    vocab = {"<unk>": 0, "hello": 1, "wörld": 2, ".": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert token_byte_list(fast) == [b"", b"hello", "wörld".encode(), b"."]


def test_a_tokenizer_without_tokenizer_json_form_is_refused():
    class Slow:
        def __len__(self) -> int:
            return 3

    with pytest.raises(ValueError, match=r"^tokenizer: expected a fast tokenizer"):
        token_byte_list(Slow())


def real_tokenizers() -> list[Path]:
    return sorted(p.parent for p in MODELS.glob("*/tokenizer.json")) if MODELS.is_dir() else []


@pytest.mark.skipif(not real_tokenizers(), reason="no folder of models (KVCORE_TEST_MODELS)")
@pytest.mark.parametrize("folder", real_tokenizers(), ids=lambda p: p.name)
def test_real_tokenizers_lose_no_byte(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = token_byte_list(tokenizer)
    assert len(pieces) <= len(tokenizer) and not any(p.startswith(b"[PAD") for p in pieces[-500:])
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert b"".join(pieces[i] for i in ids) == text.encode()
    assert all(pieces[i] == b"" for i in tokenizer.all_special_ids)
