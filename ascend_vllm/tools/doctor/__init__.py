"""`ascend-vllm doctor`: what a machine with NPUs has (`checks`), and what its cards really do (`kit`)."""
