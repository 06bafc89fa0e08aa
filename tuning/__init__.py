"""The tuner: measures a model and a disk and writes the config that a cache obeys.

`tune` does all of it (KVSwap, section 3.5 and appendix A): `probe` measures the disk, `calibrate`
finds projections and what recall each layer has at each rank, `choices` records what a model would
choose, `timing` times decoding steps, `costs` puts them together, `solver` decides, `report` shows
why. The package above, `kvswap_torch`, never imports this one: the two meet in the config file.
"""

from typing import Any

__all__ = ["TuneOptions", "TuneResult", "tune"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: `kvswap-tune --help` needs no torch.
    if name == "tune":
        from kvswap_torch.tuning.api import tune

        return tune
    if name == "TuneOptions":
        from kvswap_torch.tuning.pipeline import TuneOptions

        return TuneOptions
    if name == "TuneResult":
        from kvswap_torch.tuning.result import TuneResult

        return TuneResult
    raise AttributeError(f"module 'kvswap_torch.tuning' has no attribute {name!r}")
