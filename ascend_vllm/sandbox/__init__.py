"""Work that clients can make arbitrarily hard, in processes that the system limits and that can be killed.

`child` is what such a process runs; `pool` starts several of them, hands them jobs and replaces them.
"""
