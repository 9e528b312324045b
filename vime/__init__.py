"""vime evaluates every checkpoint of an RL post-training run without stopping training."""

__version__ = "0.1.0"
