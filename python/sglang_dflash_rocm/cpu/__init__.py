"""The CPU platform: SGLang's real runtime where there is no GPU. Active only under ``SGLANG_PLATFORM=dflash_cpu``."""
