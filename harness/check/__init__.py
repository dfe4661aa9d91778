"""Checks that need a plan: the contract at small sizes and at a run's, backends against float64."""
