"""What the simulated collectives of dlrm_fused.scaleout are compared with."""
