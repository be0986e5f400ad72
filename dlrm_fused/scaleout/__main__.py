"""``python -m dlrm_fused.scaleout``."""

import sys

from dlrm_fused.scaleout.command import main

if __name__ == "__main__":
    sys.exit(main())
