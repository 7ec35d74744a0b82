"""The internal link between router and shards."""
