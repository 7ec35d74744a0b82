"""The router: accepts client calls, schedules them and drives the shards. Never imports torch."""
