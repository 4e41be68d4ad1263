"""The bytes that each token id stands for, read off a tokenizer once.

Bytes and not text: a character may be split over tokens, and decoding such a token alone would
invent a replacement character.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_FILLER = "[PAD{}]"  # GGUF conversions name the padding rows of the output matrix like this


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Inverse of the byte-to-character table of byte-level BPE (Radford et al., GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    extra = 0
    for b in range(256):
        if b not in printable:
            table[chr(256 + extra)] = b
            extra += 1
    return table


def _decoder_types(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("tokenizer: expected a fast tokenizer (tokenizer.json), got a slow one")
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return {d["type"] for d in [decoder, *decoder.get("decoders", [])] if "type" in d}


def _byte_level(piece: str) -> bytes:
    """As the decoder of ``tokenizers``: a piece with any other character stands for itself."""
    table = _byte_of_char()
    try:
        return bytes([table[c] for c in piece])
    except KeyError:
        return piece.encode()


def token_byte_list(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Bytes of every id up to the highest real one; special tokens and unused ids stand for none.

    Ids that only fill up the vocabulary (GGUF conversions) come after the last real one.
    Raises:
        ValueError: not a fast tokenizer.
    """
    kinds = _decoder_types(tokenizer)
    added = tokenizer.added_tokens_decoder
    names = {i: name for name, i in tokenizer.get_vocab().items() if name != _FILLER.format(i)}
    special = set(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
    out = [b""] * (max(names, default=-1) + 1)
    for token_id, piece in names.items():
        if token_id in special:
            continue
        if token_id in added:
            out[token_id] = added[token_id].content.encode()
        elif "ByteLevel" in kinds:
            out[token_id] = _byte_level(piece)
        elif match := _BYTE_TOKEN.match(piece):
            out[token_id] = bytes([int(match.group(1), 16)])
        elif "Metaspace" in kinds or "ByteFallback" in kinds:
            out[token_id] = piece.replace("\u2581", " ").encode()
        else:
            out[token_id] = str(tokenizer.decode([token_id], skip_special_tokens=True)).encode()
    return out


@lru_cache(maxsize=4)
def byte_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    """The id of every byte that a token stands for alone; the lowest where there are several."""
    pieces = token_byte_list(tokenizer)
    return {piece[0]: i for i, piece in reversed(list(enumerate(pieces))) if len(piece) == 1}
