"""The public services, one file each, and what their calls share."""
