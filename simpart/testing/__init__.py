"""For authors of plug-ins: golden cases (`python -m simpart.testing FILE…`)."""

from __future__ import annotations

from simpart.testing.golden import Outcome, run_file, summary

__all__ = ["Outcome", "run_file", "summary"]
