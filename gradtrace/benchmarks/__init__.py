"""How long passes take, as ratios to PyTorch's in the same run: ``gradtrace bench``.

``run`` does the sections one by one; each gives a table (``results.Section``), from which ``page``
writes Markdown and ``figures`` draws curves. Packages that are not installed leave parts out.
"""
