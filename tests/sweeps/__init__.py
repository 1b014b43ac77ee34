"""Checks over everything there is of a kind: minutes long, run by hand (launch/models)."""
