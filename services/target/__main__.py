"""`python -m services.target`: the target service as a process."""

import sys

from services.target.process.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
