"""Writing to and reading from paged KV caches in both layouts."""
