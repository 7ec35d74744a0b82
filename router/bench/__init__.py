"""`python -m router bench`: measures a running server from separate client processes, with vLLM's flag names."""
