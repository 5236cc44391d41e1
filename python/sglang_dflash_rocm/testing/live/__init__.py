"""SGLang itself inside rank processes. The references of ``testing`` stay clear of it: they must not share its faults."""
