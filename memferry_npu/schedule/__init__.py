"""Plans: what to place, move and compute where. Pure values and functions; no device is touched."""
