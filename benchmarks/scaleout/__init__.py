"""Measurements with which the simulated collectives of dlrm_fused.scaleout are compared."""
