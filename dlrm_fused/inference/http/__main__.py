"""Starts the service: ``python -m dlrm_fused.inference.http``."""

import sys

from dlrm_fused.inference.http.command import main

if __name__ == "__main__":
    sys.exit(main())
