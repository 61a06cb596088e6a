"""`ascend-vllm bench`: measures servers under load, and the engine without a server, in the same way as vLLM."""
