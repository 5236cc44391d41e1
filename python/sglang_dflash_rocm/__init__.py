"""DFlash speculative decoding with DP attention for MiMo-V2.6-Flash on gfx942, as a plugin of released SGLang."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-dflash-rocm")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"
