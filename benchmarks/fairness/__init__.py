"""Parts of bench_fairness.py: the attacks, and the processes that send them and time the others."""
