"""A small shop that uses both tiers, and the demo that runs it on real servers."""
