"""Training of the embedded models: ``python -m kvcore.demo.train``."""
