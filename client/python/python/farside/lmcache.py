"""The connector of LMCache: values of a model's KV cache in a Farside server.

LMCache loads it as its L2 adapter `native_plugin`:

    {
        "type": "native_plugin",
        "module_path": "farside.lmcache",
        "class_name": "Connector",
        "adapter_params": {"server": "shm:///run/farside/kv.sock", "num_workers": 2}
    }
"""

from farside._farside import Connector

__all__ = ["Connector"]
