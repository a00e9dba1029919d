"""`python -m untax.cli`."""

import sys

from untax.cli import main

sys.exit(main())
