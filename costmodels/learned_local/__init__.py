"""Kernel times learned from this machine's own profiles: what `simpart fit STORE` writes beside the store.

_features   what is told of a kernel
_model      what predicts, and its file; numpy alone
_fit        what is learned, and its errors on kernels held back
"""

from simpart.costmodels.learned_local._model import FILE, Local, Unseen, load_local

__all__ = ["FILE", "Local", "Unseen", "load_local"]
