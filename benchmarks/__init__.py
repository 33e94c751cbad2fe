"""Ratios against a peer or a bare task in the same run; never a test, because machines are noisy."""
