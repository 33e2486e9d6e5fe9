"""`memferry train` for torchrun: torchrun --nproc-per-node=1 scripts/train.py run.yaml section.key=value ...

One rank so far; with more, the run says so and stops.
"""

import sys

from memferry_npu.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
