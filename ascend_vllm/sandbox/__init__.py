"""Work that clients can make arbitrarily hard, in processes that the system limits and that can be ended.

`child` is what such a process runs; `family` is how the server starts, asks and ends several of them.
"""
