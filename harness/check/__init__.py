"""Checks that need a plan: the contract at small sizes and at those of a run, backends and devices against float64."""
