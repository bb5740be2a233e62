"""``python -m raydl`` is the command ``raydl``."""

import sys

from raydl.cli import main

sys.exit(main())
