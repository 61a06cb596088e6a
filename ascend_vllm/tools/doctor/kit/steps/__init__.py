"""The steps of the kit: each module has `cases(session)`, in the order in which they run."""
