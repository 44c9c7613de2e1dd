"""`python -m gateway [flags]`."""

import sys

from gateway.process.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
