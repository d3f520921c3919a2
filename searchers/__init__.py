"""Searchers: one file per algorithm, named as `--searcher` names it.

Files that start with `_` hold what several of them share.
"""
