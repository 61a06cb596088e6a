"""What the comparisons share: the machine, its limits, the servers, the client and the rows of the table."""
