"""Learned compute models: measured kernels in, predictions of devices from their data sheets out.

_measurements, _adapters, _records, _package, _rules   the profile schema, files into it, cleaning
_sheet, _tile, _attention, _convolution, _grouped, _memory, _families   the analytic cores
_fitting, _boost, _net, _training, _calibration   what is learned
_blend, _model, _artifact, _signatures, _compute  what predicts; numpy alone
_fittable, _generations, _evaluating   what may be learned from, and how models are judged
_overheads, _launch_time   what the host takes
_command   what `simpart fit` and `simpart evaluate` ask
"""

from simpart.costmodels.learned._compute import Learned, shipped_models

__all__ = ["Learned", "shipped_models"]
