"""fkv: the context KV cache of a speculative-decoding draft model, in one kernel."""

from fkv import reference
from fkv._api import materialize

__all__ = ["materialize", "reference"]
__version__ = "0.1.0"
