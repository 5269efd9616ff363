"""`python -m distkeras` is the `distkeras` command."""

import sys

from distkeras.launch._cli import main

if __name__ == "__main__":
    sys.exit(main())
