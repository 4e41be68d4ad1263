"""Problems, and whether an answer to one is right."""

from kvcore.eval.datasets import Problem, load_problems
from kvcore.eval.grading import extract_answer, is_correct

__all__ = ["Problem", "extract_answer", "is_correct", "load_problems"]
