"""Tests of failures: killed runs, damaged or hostile files, full disks, divergence and faults of
kernels."""
