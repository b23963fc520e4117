"""The report of a trace or a run: one HTML file; traces in files; small graphs as pictures.

``building`` makes a view of a trace: dicts, lists and columns, under the names that ``web/src/
types.ts`` documents. ``encode`` makes bytes of it, ``page`` puts them into the template.
"""
