"""`ascend-vllm bench`: load for a server, and the speed of the engine without one, measured as vLLM measures them."""
