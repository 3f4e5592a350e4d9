"""The training step: capture, executor, models, data, trainer."""
