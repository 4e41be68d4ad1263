"""Embedded models and the task that they were trained on."""
