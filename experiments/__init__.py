"""Experiments that reproduce what the source documents claim: ``python -m experiments``.

``lab`` has what they share, and each is one file. What is in ``old`` is still to be written anew.
"""
