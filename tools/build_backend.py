"""What pip builds with: setuptools' own backend, or one sentence where that cannot be.

Without isolation the environment's setuptools is taken as it is. An old one would answer with pages
about ``project.license``, and a missing one with the name of a module.
"""

OLDEST = 77  # the first that reads an SPDX expression as license
HOW = f"run: pip install 'setuptools>={OLDEST}', then: pip install --no-build-isolation ."

try:
    import setuptools
except ImportError as error:
    raise SystemExit(
        f"kvswap_torch: setuptools {OLDEST} or newer must be installed to build, and none is; {HOW}"
    ) from error
if int(setuptools.__version__.split(".")[0]) < OLDEST:
    raise SystemExit(
        f"kvswap_torch: setuptools {OLDEST} or newer must be installed to build, got "
        f"{setuptools.__version__}; {HOW}"
    )
from setuptools.build_meta import *  # noqa: E402, F403
