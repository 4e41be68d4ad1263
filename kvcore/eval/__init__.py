"""Problems, runs that solve them, records of what came of it, and whether an answer is right.

What needs torch is imported from its module: ``kvcore.eval.solving``, ``kvcore.eval.records``.
"""

from kvcore.eval.datasets import Problem, load_problems
from kvcore.eval.grading import Grade, extract_answer, grade_answer, is_correct
from kvcore.eval.jsonl import Results
from kvcore.eval.runs import Run, ScorerSpec

__all__ = [
    "Grade",
    "Problem",
    "Results",
    "Run",
    "ScorerSpec",
    "extract_answer",
    "grade_answer",
    "is_correct",
    "load_problems",
]
