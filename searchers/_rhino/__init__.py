"""Parts of the search over all strategies after Rhino: settings, cost graphs of stages, levels. `rhino.py` proposes."""
