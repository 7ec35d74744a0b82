"""A shard server: one tensor-parallel slice of the model, its KV blocks and its row tables, behind gRPC."""
