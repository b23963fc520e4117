"""Experiments that reproduce the claims and figures of the sources: ``gradtrace experiment NAME``.

Each is one module with its question, expectation, method and seeds at the top. It says what there
is to measure (``cells``), measures one of these (``measure``), and says what was found
(``conclude``); see ``gradtrace.experiments.harness.findings``.
"""
