"""gtp-serve: serve Megatron GTP checkpoints and swap their weights while serving."""

__version__ = "0.1.0"
