"""Trainers of others.

``lightning.GradTrace``, ``transformers.GradTrace``, ``tensorboard.TensorBoard``. Each module needs
the package that it is named after, and is imported by itself.
"""
