"""Presets compared on retrieval tasks: the command `kvswap compare`, from a source tree.

python -m bench compare --model DIR --methods all --tasks all --budget tokens:1024,bytes:1/13
"""

from __future__ import annotations

import sys

from kvswap_torch.cli.app import main

if __name__ == "__main__":
    sys.argv[1:] = ["compare", *sys.argv[1:]]
    main()
