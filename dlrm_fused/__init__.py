"""End-to-end training of deep learning recommendation models (DLRM) on TorchRec."""

__version__ = "0.1.0"
