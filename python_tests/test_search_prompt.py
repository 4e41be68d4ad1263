"""Questions to ids, and steps from one vocabulary to another."""

import functools
import os
from pathlib import Path

import pytest
from support.fake_engine import (
    END,
    EOS,
    START,
    Draft,
    FakeEngine,
    FakeTokenizer,
    random_script,
    rule_script,
    text_draft,
)

from kvcore.config import DetectorConfig, SearchConfig
from kvcore.engine.events import Finish
from kvcore.search import Prompt, RandomScorer, Search
from kvcore.search.prompt import encode_around, prompt_ids, same_tokenizer, translator
from kvcore.search.scorers.prm import SEPARATOR, conversation_head, separator_id, step_ids


@functools.cache
def find_tokenizer():
    """Qwen2.5's tokenizer with the PRM's separator, or None where it is not on disk."""
    root = Path(__file__).resolve().parents[2]
    folders = [os.environ.get("KVCORE_TEST_MODELS"), root / "models"]
    for folder in folders:
        path = Path(folder) / "qwen2.5-coder-0.5b" if folder else None
        if path is not None and path.is_dir():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path)
            tokenizer.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
            return tokenizer
    return None


def real_tokenizer():
    found = find_tokenizer()
    if found is None:
        pytest.skip("no Qwen2.5 tokenizer: set KVCORE_TEST_MODELS")
    return found


class TestPromptIds:
    def test_template_with_and_without_system_message(self):
        tokenizer = FakeTokenizer(chat=True)
        user = [START, *b"user\nhi", END, 10, START, *b"assistant\n"]
        assert prompt_ids(tokenizer, Prompt("hi"), None) == user
        assert prompt_ids(tokenizer, Prompt("hi"), "s") == [START, *b"system\ns", END, 10, *user]

    def test_without_template_system_prompt_and_question_are_plain_text(self):
        tokenizer = FakeTokenizer()
        assert prompt_ids(tokenizer, Prompt("hi"), "Be brief.") == list(b"Be brief.\n\nhi")
        for nothing in (None, ""):
            assert prompt_ids(tokenizer, Prompt("hi"), nothing) == list(b"hi")

    def test_given_text_is_used_as_it_is(self):
        text = "<start>hi"
        for chat in (False, True):
            tokenizer = FakeTokenizer(chat=chat)
            assert prompt_ids(tokenizer, Prompt("q", text=text), "s") == [START, *b"hi"]


class TestTranslator:
    def models(self, shift):
        first = FakeEngine(name="first").model
        second = FakeEngine(name="second", tokenizer=FakeTokenizer(shift=shift)).model
        return first, second

    def test_ids_pass_untouched_between_equal_vocabularies(self):
        first, second = self.models(0)
        assert first.tokenizer is not second.tokenizer
        assert same_tokenizer(first.tokenizer, second.tokenizer)
        ids = [1, 300, EOS]
        assert translator(first, second).ids(ids, b"whatever", ends=True) == ids

    def test_text_passes_between_different_ones_and_eos_becomes_the_receivers(self):
        first, second = self.models(5)
        carry = translator(first, second)
        assert not carry.same
        assert carry.ids(list(b"ab"), b"ab", ends=False) == [ord("a") + 5, ord("b") + 5]
        assert carry.ids([*b"a", EOS], b"a", ends=True) == [ord("a") + 5, EOS]
        assert carry.ids([EOS], b"", ends=True) == [EOS]

    def test_names_of_special_tokens_and_cut_characters_are_harmless(self):
        first, second = self.models(5)
        carry = translator(first, second)
        assert EOS not in carry.ids([], b"<eos>", ends=False)
        cut = "é".encode()[:1]
        assert carry.ids([], b"a" + cut, ends=False) == [ord("a") + 5]

    def test_search_with_two_vocabularies_keeps_one_text(self):
        shift = 7
        base = FakeEngine(random_script(), detector=DetectorConfig())
        helper = FakeEngine(random_script(), tokenizer=FakeTokenizer(shift=shift))
        texts = []

        def look(event):
            if event.event == "step":
                sides = search._rescue.active[event.problem].sides
                texts.append(
                    [s.lease.port.text(s.lease.port.tokens(s.root)) for s in sides.values()]
                )

        search = Search(
            base,
            ["question"],
            scorer=RandomScorer(1),
            helper=helper,
            config=SearchConfig(n=2, max_steps=25),
            on_event=look,
        )
        assert len(search.warnings) == 1
        assert "different tokenizers" in search.warnings[0]
        [solution] = search.run()
        assert {s.source for s in solution.steps} == {"base", "helper"}
        assert texts
        for base_text, helper_text in texts[:-1]:
            # Invalid bytes have no ids in another vocabulary; what can be said is the same.
            assert base_text.decode("utf-8", "ignore") == helper_text.decode("utf-8", "ignore")

    def test_a_helpers_eos_is_committed_as_the_bases(self):
        base = FakeEngine(rule_script(lambda *_: text_draft("\n\n")), detector=DetectorConfig())
        word = [ord(c) + 1 for c in "done"]
        helper = FakeEngine(
            lambda *_: Draft([*word, EOS], Finish.EOS), tokenizer=FakeTokenizer(shift=1)
        )
        [solution] = Search(base, ["q"], scorer=RandomScorer(), helper=helper).run()
        assert solution.token_ids == (*b"done", EOS)
        assert solution.text == "done"


class TestPrmConversation:
    """What is fed piece by piece equals the tokens of the whole conversation."""

    STEPS = (
        "To solve this, we start:\n\n",
        "First, $x^2 = 4$.\n\n",
        "  indented, ends in a space \n\n",
        "- a list\n- of things\n\n",
        "\n\n\n\n",
        "The answer is \\boxed{2}.",
    )

    def conversation(self, question, steps, system):
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "".join(s.strip() + SEPARATOR for s in steps)},
        ]

    @pytest.mark.parametrize("real", [False, True])
    @pytest.mark.parametrize(
        "question", ["What is 2?", "  odd\n\nquestion \n", "é 中文 \U0001f600"]
    )
    def test_pieces_equal_the_whole(self, real, question):
        tokenizer = real_tokenizer() if real else FakeTokenizer(chat=True)
        separator = separator_id(tokenizer)
        fed = conversation_head(tokenizer, question, "Be good.")
        for step in self.STEPS:
            fed += step_ids(tokenizer, step, separator)
        text = tokenizer.apply_chat_template(
            self.conversation(question, self.STEPS, "Be good."),
            tokenize=False,
            add_generation_prompt=False,
        )
        whole = list(tokenizer(text, add_special_tokens=False).input_ids)
        assert whole[: len(fed)] == fed
        assert fed.count(separator) == len(self.STEPS)
        assert separator not in whole[len(fed) :]

    @pytest.mark.parametrize("real", [False, True])
    @pytest.mark.parametrize(
        "text", ["a<extra_0>b\n\n", "<extra_0>", "\n\n\n\n", "", "ends\n\n", "<|im_end|><end>"]
    )
    def test_every_step_adds_exactly_one_separator(self, real, text):
        tokenizer = real_tokenizer() if real else FakeTokenizer(chat=True)
        separator = separator_id(tokenizer)
        ids = step_ids(tokenizer, text, separator)
        assert ids.count(separator) == 1
        assert ids[-1] == separator
        special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        assert not special & set(ids[:-1])

    @pytest.mark.parametrize("real", [False, True])
    def test_special_names_in_the_question_are_text(self, real):
        tokenizer = real_tokenizer() if real else FakeTokenizer(chat=True)
        plain = conversation_head(tokenizer, "x", "s")
        odd = conversation_head(tokenizer, "<extra_0><|im_end|><end>", "s")
        special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        assert [i for i in odd if i in special] == [i for i in plain if i in special]

    @pytest.mark.parametrize("real", [False, True])
    def test_newline_mode_equals_the_whole(self, real):
        tokenizer = real_tokenizer() if real else FakeTokenizer(chat=True)
        steps = [s for s in self.STEPS if s.strip()]
        fed = conversation_head(tokenizer, "q", "s")
        for step in steps:
            fed += step_ids(tokenizer, step, None)
        content = "".join(s.strip() + "\n\n" for s in steps)
        messages = self.conversation("q", [], "s")
        messages[2]["content"] = content
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        whole = list(tokenizer(text, add_special_tokens=False).input_ids)
        assert whole[: len(fed)] == fed

    def test_a_vocabulary_without_separator_is_refused(self):
        tokenizer = FakeTokenizer()
        vocab = {k: v for k, v in tokenizer.get_vocab().items() if k != SEPARATOR}
        tokenizer.get_vocab = lambda: vocab
        with pytest.raises(ValueError, match="<extra_0>"):
            separator_id(tokenizer)


def test_encode_around_without_special_tokens():
    tokenizer = FakeTokenizer()
    tokenizer.added_tokens_decoder = {}
    assert encode_around(tokenizer, "a", "b", "c") == list(b"abc")
