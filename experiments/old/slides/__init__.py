"""The parts of the experiment ``checks``, which comes from the slides: one question a file."""
