"""The harness of experiments: their interface, journal, worker processes, results and pages.

``gradtrace.experiments`` has the experiments of the sources; a user's file with the interface in
``gradtrace.experiments.harness.findings`` is run by the same command.
"""
