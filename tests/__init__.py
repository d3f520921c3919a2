"""Tests by topic; `tests.models` and `tests.vocabulary` are also used by `docs/formats.md`."""
