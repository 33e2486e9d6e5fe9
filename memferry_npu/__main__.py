"""`python -m memferry_npu` is the `memferry` command."""

import sys

from memferry_npu.cli import main

if __name__ == "__main__":
    sys.exit(main())
