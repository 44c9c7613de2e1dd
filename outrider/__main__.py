"""`python -m outrider`: the same as the command `outrider`."""

import sys

from outrider.cli import main

if __name__ == "__main__":
    sys.exit(main())
