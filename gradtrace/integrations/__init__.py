"""Integrations with other packages' trainers and loggers.

``lightning.GradTrace``, ``transformers.GradTrace``, ``accelerate.GradTrace``,
``tensorboard.TensorBoard``. Each module needs the package that it is named after, and has to be
imported explicitly. A W&B run is a logger as it is: ``Monitor(loggers=[wandb.init()])``.
"""
