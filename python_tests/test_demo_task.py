"""The demo's task: right by an independent reading, split without overlap, tokenized exactly."""

import re
from itertools import islice

import pytest

from kvcore.demo.task import (
    NAMES,
    SPLITS,
    Difficulty,
    computation_step,
    parse_problem,
    problems,
)
from kvcore.demo.vocabulary import EOS, SEPARATOR, encode, make_tokenizer, pieces, token_id
from kvcore.models.token_bytes import token_byte_list
from kvcore.search import DEFAULT_SYSTEM_PROMPT, Prompt
from kvcore.search.prompt import prompt_ids
from kvcore.search.scorers.prm import conversation_head


def draw(split, count, seed=0, difficulty=None):
    return list(islice(problems(split, seed, difficulty), count))


def answer_from_text(question):
    """The answer by a second reading of the question, sharing no code with the task."""
    ledger, chain = question.split("? ")
    values = dict(re.findall(r"(\w+)=(\d\d)", ledger))
    total = 0
    *operations, end = chain.rstrip(".").split(", ")
    assert end == f"{chr(ord('A') + len(operations))} answer"
    for i, operation in enumerate(operations):
        parts = operation.split()
        value = int(values[parts[-1].rstrip("=")])
        if i == 0:
            total = value
        elif parts[1] == "*":
            total = total * value % 100
        else:
            total = (total + (value if parts[1] == "+" else -value)) % 100
    return f"{total:02d}"


def test_answers_agree_with_an_independent_reading_of_the_question():
    for problem in draw("test", 300):
        assert problem.answer == answer_from_text(problem.question)
        assert problem.is_solved_by(problem.solution)
        wrong = f"{(int(problem.answer) + 1) % 100:02d}"
        assert not problem.is_solved_by(problem.solution[:-2] + wrong)


def test_a_solution_without_its_last_line_is_not_right():
    problem = draw("test", 1)[0]
    cut = "".join(problem.steps[:-1])
    assert not problem.is_solved_by(cut)
    assert not problem.is_solved_by("")


def test_sets_never_overlap():
    drawn = {split: {p.question for p in draw(split, 1500, seed=3)} for split in SPLITS}
    for split, questions in drawn.items():
        for other in SPLITS:
            assert other == split or not questions & drawn[other]


def test_small_problems_stay_in_one_set_whatever_the_seed():
    # So few different problems exist that random draws alone would meet in two sets.
    tiny = Difficulty(names=(1, 1), operations=(1, 1))
    drawn = {split: {p.question for p in draw(split, 400, difficulty=tiny)} for split in SPLITS}
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["calibration"]
    assert not drawn["test"] & drawn["calibration"]


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert draw("test", 20, seed=1) == draw("test", 20, seed=1)
    assert draw("test", 20, seed=1) != draw("test", 20, seed=2)


def test_difficulty_is_obeyed():
    difficulty = Difficulty(names=(5, 7), operations=(3, 4), products=1.0)
    for problem in draw("train", 200, difficulty=difficulty):
        assert 5 <= len(problem.ledger) <= 7
        assert 3 <= len(problem.operations) <= 4
        assert all(operator == "*" for operator, _ in problem.operations)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"names": (0, 3)}, "names"),
        ({"names": (5, 4)}, "names"),
        ({"names": (5, len(NAMES) + 1)}, "names"),
        ({"operations": (0, 1)}, "operations"),
        ({"operations": (3, 16)}, "operations"),
        ({"products": 1.5}, "products"),
    ],
)
def test_impossible_difficulties_are_named(fields, name):
    with pytest.raises(ValueError, match=name):
        Difficulty(**fields)


def test_an_unknown_set_is_named():
    with pytest.raises(ValueError, match="split: expected one of train, calibration, test"):
        next(problems("dev", 0))


def test_expected_follows_the_solution_step_by_step():
    for problem in draw("test", 100):
        for i, step in enumerate(problem.steps):
            assert problem.expected(problem.steps[:i]) == step


def test_expected_takes_wrong_numbers_as_they_were_written():
    problem = next(p for p in draw("train", 200) if len(p.operations) >= 3)
    first, second = problem.steps[:2]
    changed = re.sub(r"=\d\d", "=41", first)
    head, _, operator, right = re.fullmatch(r"(.*: )(\d\d) ([*+-]) (\d\d)\n\n", second).groups()
    carried = f"{head}41 {operator} {right}\n\n"
    assert problem.expected([changed]) == carried
    assert problem.expected([changed, carried]) == computation_step(41, operator, int(right))


def test_expected_passes_over_text_that_is_no_step():
    problem = draw("train", 1)[0]
    steps = problem.steps
    assert problem.expected([steps[0], "* * *\n\n", " answer\n\n"]) == steps[1]


def test_a_question_can_be_read_back():
    for problem in draw("train", 50):
        read = parse_problem(problem.question)
        assert read.question == problem.question and read.steps == problem.steps


@pytest.mark.parametrize(
    "text", ["", "What is 2 + 2?", "oak=17? A oak=.", "oak=17? B oak=, B answer."]
)
def test_other_questions_are_refused(text):
    with pytest.raises(ValueError, match="question: expected one of the demo's task"):
        parse_problem(text)


def test_tokenizer_is_exact_and_equals_the_fast_encoder():
    tokenizer = make_tokenizer()
    for problem in draw("test", 50):
        text = problem.prompt + problem.solution
        ids = tokenizer(text).input_ids
        assert ids == encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_every_token_has_its_own_text_as_bytes():
    tokenizer = make_tokenizer()
    texts = token_byte_list(tokenizer)
    special = tokenizer.all_special_tokens
    assert texts == [b"" if piece in special else piece.encode() for piece in pieces()]
    assert {EOS, SEPARATOR} <= set(special)


def test_a_question_becomes_the_prompt_that_the_models_were_trained_on():
    tokenizer = make_tokenizer()
    problem = draw("test", 1)[0]
    trained = encode(problem.prompt)
    for system in (DEFAULT_SYSTEM_PROMPT, None):
        assert prompt_ids(tokenizer, Prompt(problem.question), system) == trained
    assert conversation_head(tokenizer, problem.question, DEFAULT_SYSTEM_PROMPT) == trained


def test_text_outside_the_vocabulary_is_refused_by_the_fast_encoder():
    with pytest.raises(KeyError):
        encode("zebra=11")
    with pytest.raises(KeyError):
        token_id("zebra=")
