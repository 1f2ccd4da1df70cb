"""`python -m vlmroll`."""

import sys

from vlmroll.cli import main

sys.exit(main())
