"""The tuner: measures a model and a disk and writes the config that a cache obeys.

`calibrate` runs a model over sample text (KVSwap, section 3.2 and appendix A.1) and finds the
projections and a rank for each layer. The package above, `kvswap_torch`, never imports this one:
the two meet in the config file.
"""
