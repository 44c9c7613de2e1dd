"""`python -m services.draft.train`: the training of a draft as a process."""

import sys

from services.draft.train.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
