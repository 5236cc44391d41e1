"""SGLang itself inside rank processes. The references of ``testing`` stay clear of it, to share none of its faults."""
