"""The tokenizer that a checkpoint's files describe."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def open_tokenizer(folder: Path, argument: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory.

    ``tokenizer.json`` is the truth where there is one: ids are those that the library
    ``tokenizers`` gives for it, without truncation, padding and dropout. transformers builds some
    tokenizers anew around the file's vocabulary, with the algorithm that their class usually has;
    such a one is used only if nothing in it differs from the file.
    Raises:
        ValueError: no files, or damaged ones.
    """
    # Without files transformers may make an empty tokenizer of the model's usual class.
    if not any((folder / name).is_file() for name in _FILES):
        names = ", ".join(_FILES)
        raise ValueError(f"{argument}: no tokenizer in {str(folder)!r}: expected one of {names}")
    file = folder / "tokenizer.json"
    try:
        if not file.is_file():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return _of_file(folder, file)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        reason = " ".join(str(error).split())
        raise ValueError(f"{argument}: no usable tokenizer in {str(folder)!r}: {reason}") from error


def _of_file(folder: Path, file: Path) -> PreTrainedTokenizerBase:
    stored = Tokenizer.from_file(str(file))
    if getattr(stored.model, "dropout", None):
        stored.model.dropout = None  # ids that are drawn anew each time are a matter of training
    truth = _state(stored)
    usual: Any = None
    with contextlib.suppress(Exception):  # an unknown class, or code of its own: the file says all
        usual = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if usual is not None and _says_the_same(usual, truth, others=False):
        return _plain(usual)
    plain: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    if not _keeps_added_tokens(_state(plain.backend_tokenizer), truth):
        names = {name: getattr(plain, name) for name in _NAMED if getattr(plain, name)}
        template = plain.chat_template
        plain = PreTrainedTokenizerFast(
            tokenizer_object=stored, chat_template=template, name_or_path=str(folder), **names
        )
    _restore(plain, stored)
    vocabulary = stored.get_vocab()
    for name in _NAMED:  # defaults of the usual class that the file knows
        value = getattr(usual, name, None)
        if getattr(plain, name) is None and value in vocabulary:
            setattr(plain, name, value)
    if not _says_the_same(plain, truth, others=True):
        raise ValueError("its tokenizer.json cannot be served as it is")
    return _plain(plain)


def _plain(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Without what a file may bake in for training, which would cut prompts or fill them up."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    result: PreTrainedTokenizerBase = tokenizer
    return result


def _state(backend: Tokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


def _says_the_same(tokenizer: Any, truth: dict[str, Any], *, others: bool) -> bool:
    """Whether every text becomes the ids, and every id the text, that the file says.

    ``others``: there may be added tokens that the file lacks (those of the configuration).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    own = _state(backend)  # costs a second for large vocabularies: once
    if not others and len(own["added_tokens"]) != len(truth["added_tokens"]):
        return False
    # Without a post-processor in the file the configuration says which tokens are put in front.
    parts = [p for p in _PARTS if p != "post_processor" or truth[p] is not None]
    return all(own[part] == truth[part] for part in parts) and _keeps_added_tokens(own, truth)


def _keeps_added_tokens(state: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Whether the file's added tokens are matched as it says; there may be others besides.

    The configuration may declare a token special that the file does not.
    """
    own = {token["id"]: token for token in state["added_tokens"]}
    for token in truth["added_tokens"]:
        other = own.get(token["id"], {})
        if other != token and other != {**token, "special": True}:
            return False
    return True


def _restore(tokenizer: Any, stored: Tokenizer) -> None:
    """Puts the file's parts back in place. Modifies ``tokenizer``."""
    backend = tokenizer.backend_tokenizer
    backend.model = stored.model
    backend.normalizer = stored.normalizer
    backend.pre_tokenizer = stored.pre_tokenizer
    backend.decoder = stored.decoder
    if stored.post_processor is not None:
        backend.post_processor = stored.post_processor
