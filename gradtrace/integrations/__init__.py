"""Integrations with other packages' trainers and loggers.

``lightning.GradTrace``, ``transformers.GradTrace``, ``tensorboard.TensorBoard``. Each module needs
the package that it is named after, and has to be imported explicitly.
"""
