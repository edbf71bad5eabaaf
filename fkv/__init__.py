"""fkv: the context KV cache of a speculative-decoding draft model, in one kernel."""

from fkv import reference
from fkv._api import materialize, warmup, write_cache
from fkv._materializer import KVMaterializer

__all__ = ["KVMaterializer", "materialize", "reference", "warmup", "write_cache"]
__version__ = "0.1.0"
