"""`python -m redrafter` is the command `redrafter`."""

import sys

from redrafter.cli.main import main

sys.exit(main())
