"""largetrain: train large models with DeepSpeed, by config alone."""

__version__ = "0.1.0"
