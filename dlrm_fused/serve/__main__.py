"""``python -m dlrm_fused.serve``."""

import sys

from dlrm_fused.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
