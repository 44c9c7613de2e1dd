"""`python -m services.draft`: the draft service as a process."""

import sys

from services.draft.process.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
