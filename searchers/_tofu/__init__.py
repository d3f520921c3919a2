"""Partition search after Tofu: coarsening, steps, recursion, joint solve, baselines, plans; `tofu.py` proposes."""
