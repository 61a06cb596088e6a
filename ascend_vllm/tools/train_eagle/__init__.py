"""`ascend-vllm train-eagle`: trains an EAGLE head for a model that this server serves.

The model runs as it is served, in a worker, and the head learns to predict its hidden states: `states` reads them,
`head` is the head and its loss, `data` the texts, `training` the loop, `cli` the command.
"""
