"""Runs the command ``raydl`` as ``python -m raydl``."""

import sys

from raydl.cli import main

sys.exit(main())
