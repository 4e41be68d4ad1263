"""Training: one loop for whoever trains, whose state on disk resumes it exactly."""

from kvcore.train.bars import Bars
from kvcore.train.checkpoint import load_state, save_state, trained
from kvcore.train.loop import Report, Schedule, train

__all__ = ["Bars", "Report", "Schedule", "load_state", "save_state", "train", "trained"]
