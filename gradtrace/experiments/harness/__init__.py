"""What runs experiments: what one is, its journal, processes and machines, results and pages.

``gradtrace.experiments`` holds those of the sources; a file of your own that follows
``gradtrace.experiments.harness.findings`` is run by the same command.
"""
