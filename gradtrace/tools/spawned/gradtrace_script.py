"""The user's script, in a process that it has spawned: imported again, in the place of this module.

The folder is on ``sys.path`` while a command runs a script (see ``user_script.main``), and spawned
processes have the path of their parent.
"""

import os
from pathlib import Path

from gradtrace.tools import user_script

if user_script.PLACE in os.environ:
    user_script.imported(Path(os.environ[user_script.PLACE]), __name__)
