"""transformers' own server over saved caches; ``kvswap serve``."""
