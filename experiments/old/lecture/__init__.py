"""The parts of the experiment ``programs``: a claim of lecture, slides or note in each file.

Each part has ``cells``, ``measure`` and ``conclude`` as an experiment has, and gradients come from
``gradtrace.backward`` alone: nothing here calls ``.backward()`` or an optimiser of torch.
"""
