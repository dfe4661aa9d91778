"""Tests of failures: killed runs, damaged or hostile files, full disks, divergence and lost processes."""
