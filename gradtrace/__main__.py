"""``python -m gradtrace``: the same as the command ``gradtrace``."""

from gradtrace.cli import main

if __name__ == "__main__":
    main()
