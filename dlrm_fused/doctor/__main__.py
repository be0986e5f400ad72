"""``python -m dlrm_fused.doctor``."""

import os
import sys

from dlrm_fused.doctor.command import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit would not do: a check that hangs, or a process group that was never complete, would keep the process.
    os._exit(status)
