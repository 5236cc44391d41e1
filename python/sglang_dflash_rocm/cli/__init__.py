"""The ``dflash-rocm`` command."""
